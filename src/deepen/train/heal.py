"""Healing: a model that was cut, looped or merged learns again to predict a text, and is saved as what it was.

    text -> train part -> training loop -> merge LoRA -> type of the files -> new folder
         '-> held-out part -> loss before ................. loss after  -> paired difference

The losses are of the same windows, so their difference has an interval over windows. The loss after is that of the
weights as they are saved: LoRA merged, rounded to the type of the files, computed in the type that was trained in.

Several processes share every batch; each holds the whole model and teacher, and the first alone writes.

Sources: LoRA, arXiv:2106.09685; distillation, arXiv:1503.02531; healing of cut models, arXiv:2403.17887.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from deepen.checkpoint.atomic import atomic_folder
from deepen.checkpoint.load import quiet
from deepen.checkpoint.save import carry
from deepen.errors import DataError, FamilyError, SaveError, UsageError, nearest
from deepen.probe.interval import Difference, paired_difference
from deepen.probe.perplexity import Evaluation, is_causal, perplexity
from deepen.probe.scarce import lowering
from deepen.train.curriculum import Curriculum, Turns, ranges
from deepen.train.data import batches_of, split
from deepen.train.distributed import ALONE, Processes
from deepen.train.log import Entry
from deepen.train.loop import seeded, train
from deepen.train.losses import CrossEntropy, Distillation, Loss
from deepen.train.recipe import Recipe
from deepen.train.select import add_lora, select_layers, select_owned
from deepen.train.selective.choice import SELECTIVE, Choice, start
from deepen.train.selective.inflection import inflection_layers
from deepen.train.state import require_start

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase

Mode = Literal["full", "lora", "layers", "owned", "fim", "inflection", "slicefine", "losia", "slam", "spu"]
MODES = ("full", "lora", "layers", "owned", *SELECTIVE)
# The modes that put adapters beside the matrices.
ADAPTED = ("lora", "inflection")
# The modes that one process alone trains.
LONE = tuple(mode for mode in SELECTIVE if mode not in ADAPTED)


@dataclass(frozen=True, kw_only=True)
class Healed:
    """What healing did.

    Attributes:
        program: that the model runs.
        before: the held-out loss before.
        after: that of the weights as saved.
        difference: after less before; below 0 is better.
        steps: updates.
        tokens: tokens trained on.
        parameters: numbers trained.
        layers: that were named or chosen; none where all are trained.
    """

    program: str
    before: Evaluation
    after: Evaluation
    difference: Difference
    steps: int
    tokens: int
    parameters: int
    layers: tuple[int | str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        parts = {name: getattr(self, name).to_json() for name in ("before", "after", "difference")}
        return {"program": self.program, **parts} | {
            name: getattr(self, name) for name in ("steps", "tokens", "parameters", "layers")
        }


def heal(
    ck: Checkpoint,
    text: str,
    output: str | Path,
    *,
    recipe: Recipe | None = None,
    mode: Mode = "full",
    layers: Sequence[int | str] = (),
    rank: int = 8,
    choice: Choice | None = None,
    distil: float = 0.0,
    temperature: float = 1.0,
    hidden: float = 0.0,
    teacher: Checkpoint | None = None,
    curriculum: Curriculum | None = None,
    context: int = 512,
    held_out: float = 0.1,
    held_out_tokens: int = 8192,
    device: str = "cpu",
    dtype: str | None = None,
    resume: bool = False,
    keep_adapter: bool = False,
    report: Callable[[Entry], None] | None = None,
    processes: Processes = ALONE,
) -> Healed:
    """Trains a checkpoint on a text and saves it, with its program, to a new folder.

    While it runs, the log and the last state are in the folder `<output>.healing`; the log ends up as `heal.jsonl` in
    the result.

    Args:
        ck: the checkpoint with the program to heal.
        text: its last part is held out.
        output: a folder that does not exist yet.
        recipe: steps, rate, batch, seed ...
        mode: train all weights, LoRA beside every matrix, the weights of `layers`, what the program owns (`owned`), or
            what a selective mode chooses.
        layers: layers of the bank, or single copies such as `3!1`, for all modes but `full`, `fim` and
            `inflection`.
        rank: of LoRA.
        choice: the options of the selective modes.
        distil: weight of the teacher's predictions, 0 to 1.
        temperature: of the distillation.
        hidden: weight of the streams at marks that the program and the teacher's share.
        teacher: the checkpoint to learn from; None takes the original program of the same weights.
        curriculum: how often run-time loops run in each step; None lets them run their maximum.
        context: tokens of a window.
        held_out: the share of the text, at its end, that is not trained on.
        held_out_tokens: tokens of it to read, at most.
        device: where the weights go.
        dtype: the type they are trained in; None is float32. They are saved in that of the files, in
            which the teacher runs too, unless one is given.
        resume: go on with a run that was stopped or killed.
        keep_adapter: save LoRA beside the weights, in the folder `adapter`, in place of merging it.
        report: called after every step.
        processes: who heal it together; each calls this with the same arguments, and the first one alone writes and
            reports.

    Raises:
        UsageError: settings that do not fit together, the model or the run that is resumed.
        DataError: too little text.
        FamilyError: weights that cannot be trained, or a model without a causal head.
        ElsewhereError: another process failed.
        NotFinite: a loss or gradient that is NaN or infinite.
        Stopped: SIGTERM came; the state is saved.
        SaveError: something cannot be written; the last state is whole.

    Example:
        >>> import deepen
        >>> cut = deepen.open("model").apply("0-17 23-27")                              # doctest: +SKIP
        >>> deepen.heal(cut, text, "healed", mode="lora", distil=0.9).difference        # doctest: +SKIP
    """
    recipe, output, choice = recipe or Recipe(), Path(output), choice or Choice()
    _require_settings(ck, output, mode, layers, keep_adapter)
    choice.require(mode, layers)
    _require_shares(mode, recipe, processes)
    device = str(processes.place(device))
    work = output.with_name(f"{output.name}.healing")
    require_start(work, resume)
    if not 0 <= distil <= 1:
        raise UsageError(f"--distil {distil}: expected a weight from 0 to 1")
    if dtype == "float16":
        raise UsageError("--dtype float16: small gradients become 0 in it; train in float32, with --autocast for speed")
    if held_out_tokens < context:
        raise UsageError(f"--held-out-tokens {held_out_tokens}: expected at least one window of {context} tokens")
    if curriculum is not None:
        ranges(ck.plan())
    teaches = bool(distil or hidden)
    chosen = _teacher(ck, teacher) if teaches else None
    tokenizer = ck.tokenizer()
    learned, looked = split(text, held_out)
    batches = batches_of(tokenizer, learned, context=context, batch=recipe.batch, seed=recipe.seed)
    if mode == "inflection":
        with lowering(batch=recipe.batch, context=context):
            layers = processes.by_first(
                lambda: inflection_layers(ck, learned, context=context, device=device, dtype=dtype or "float32").layers
            )
    model = ck.load(device=device)
    if not is_causal(model):
        raise FamilyError(f"{ck.where}: {type(model).__name__} has no causal head; heal trains models that have one")
    stored = _to(model, dtype or "float32", ck.where)
    batch = recipe.batch // recipe.accumulate

    def evaluate() -> Evaluation:
        try:
            return perplexity(model, tokenizer, looked, context=context, tokens=held_out_tokens, batch=batch)
        except DataError as error:
            raise DataError(f"the held-out part of the text: {error}") from error

    with lowering(batch=recipe.batch, context=context):
        before = evaluate()
        loss: Loss = CrossEntropy(scored_from=batches.scored_from)
        if chosen is not None:
            loss = Distillation(
                teacher=_load_teacher(chosen, tokenizer, device, dtype),
                weight=distil,
                temperature=temperature,
                hidden=hidden,
                scored_from=batches.scored_from,
            )
        tower = ck.family.tower("").name
        adapters = selection = None
        if mode in ADAPTED:
            with seeded(recipe.seed):
                adapters = add_lora(model, rank, tower, layers)
        elif mode == "layers":
            select_layers(model, layers, tower)
        elif mode == "owned":
            select_owned(model)
        elif mode in SELECTIVE:
            selection, layers = start(
                mode, choice, model, tokenizer, batches, tower=tower, layers=layers, batch=batch, seed=recipe.seed
            )
        settings = {
            "model": ck.where, "program": str(ck.program), "text": batches.digest, "context": context, "mode": mode,
            "layers": list(layers), "rank": rank if mode in ADAPTED else None, "distil": distil,
            "temperature": temperature, "distil_hidden": hidden, "dtype": dtype or "float32",
            "choice": choice.settings(mode),
            "teacher": None if chosen is None else f"{chosen.where} {chosen.program}",
        }  # fmt: skip
        if curriculum is not None:
            settings |= curriculum.settings()
        trained = train(
            model,
            batches,
            recipe,
            loss=loss,
            folder=work,
            resume=resume,
            settings=settings,
            turns=curriculum and Turns(model, curriculum, steps=recipe.steps, seed=recipe.seed, tower=tower),
            evaluate=lambda: (found := evaluate()).nll / found.tokens,
            report=report,
            selection=selection,
            processes=processes,
        )
        if selection is not None:
            selection.release()
        if adapters is not None and not keep_adapter:
            adapters.merge_and_unload(safe_merge=True)
        _round(model, stored)
        after = evaluate()
    processes.by_first(lambda: _save(ck, model, output, work, stored, adapters if keep_adapter else None))
    return Healed(
        program=str(ck.program),
        before=before,
        after=after,
        difference=paired_difference(after, before, seed=recipe.seed),
        steps=trained.steps,
        tokens=trained.steps * recipe.batch * context,
        parameters=trained.parameters,
        layers=tuple(layers),
    )


def _require_settings(ck: Checkpoint, output: Path, mode: str, layers: Sequence[int | str], keep_adapter: bool) -> None:
    """Refuses, before anything is read, what could only fail after the training."""
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r} is unknown{nearest(mode, MODES)}; expected one of {', '.join(MODES)}")
    if mode == "layers" and not layers:
        raise UsageError("--mode layers needs the layers to train: --layers 3,5")
    if mode in ("full", "owned") and layers:
        raise UsageError("--layers is about --mode layers and --mode lora; name the mode or leave the layers out")
    if mode == "owned" and not any(ck.sets.values()):
        raise UsageError(f"--mode owned: the program {ck.program} owns no parameters, as (1-3)*2[lora=8] would")
    if keep_adapter and mode not in ADAPTED:
        raise UsageError("--keep-adapter is about --mode lora and --mode inflection; name the mode or leave it out")
    if ck.adapter is not None:
        raise UsageError(f"{ck.where} has an adapter in {ck.adapter}; merge it into the weights before healing")
    if os.path.lexists(output):
        raise SaveError(f"{output} exists already and is left as it is; choose a new name or remove it first")
    parent = output.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SaveError(f"cannot write {output}: {parent} is not a folder that can be written; make it first")
    ck.require_executable()
    ck.require_layers()


def _require_shares(mode: str, recipe: Recipe, processes: Processes) -> None:
    """Refuses what several processes cannot heal as it stands.

    Raises:
        UsageError: the batch does not divide, the parameters would be shares, or the mode chooses for itself.
    """
    if processes.count == 1:
        return
    if processes.sharded:
        raise UsageError(
            "fsdp gives each process a share of the parameters, and healing needs whole ones: it merges, rounds and "
            "reads them beside the training; choose ddp"
        )
    if mode in LONE:
        others = ", ".join(each for each in MODES if each not in LONE)
        raise UsageError(
            f"--mode {mode} chooses what it trains by what one process computes, and {processes.count} processes might "
            f"choose differently; start one process, or choose one of {others}"
        )
    processes.share(torch.empty(recipe.batch), recipe.accumulate)


def _teacher(ck: Checkpoint, given: Checkpoint | None) -> Checkpoint:
    """The checkpoint to learn from.

    Raises:
        UsageError: none is given and the program is the original one.
    """
    if given is not None:
        return given
    if ck.program == ck.identity:
        raise UsageError(
            f"{ck.where} runs every layer of its files once, so it would learn from itself; name the model it was "
            "cut from with --teacher, or give the whole model and the PROGRAM to heal"
        )
    return ck.apply(ck.identity)


def _load_teacher(
    chosen: Checkpoint, tokenizer: PreTrainedTokenizerBase, device: str, dtype: str | None
) -> PreTrainedModel:
    """The teacher, ready to be asked.

    Raises:
        UsageError: its tokens are others than the model's.
    """
    if chosen.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"{chosen.where}: the teacher's tokens are others than the model's; distillation needs the same"
        )
    return chosen.load(dtype=dtype, device=device).requires_grad_(False)


def _to(model: PreTrainedModel, dtype: str, where: str) -> dict[str, torch.dtype]:
    """Brings the weights to the type to train in.

    Returns:
        The types they had.

    Raises:
        FamilyError: weights that are not plain numbers.
    """
    stored = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise FamilyError(f"{where}: {name} is of the type {parameter.dtype}, which cannot be trained; heal the "
                              "checkpoint before it is quantised")  # fmt: skip
        stored[name] = parameter.dtype
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return stored


def _round(model: PreTrainedModel, stored: Mapping[str, torch.dtype]) -> None:
    """Gives every weight the value that it has in the type of the files."""
    for name, parameter in _stored_weights(model, stored):
        parameter.data = parameter.data.to(stored[name]).to(parameter.dtype)


def _stored_weights(model: PreTrainedModel, stored: Mapping[str, torch.dtype]) -> list[tuple[str, torch.nn.Parameter]]:
    """The weights of the files, by their names without the adapters that may stand beside them."""
    named = [(name.replace(".base_layer.", "."), parameter) for name, parameter in model.named_parameters()]
    return [(name, parameter) for name, parameter in named if name in stored]


def _save(
    ck: Checkpoint, model: PreTrainedModel, output: Path, work: Path, stored: Mapping[str, torch.dtype], adapters: Any
) -> None:
    """Writes the healed checkpoint, its tokenizer and other files, and the log, and removes the states.

    Raises:
        SaveError: it cannot be written; the state of the run is whole.
    """
    inputs = [path for path in (ck.folder, ck.gguf) if path is not None]
    try:
        with atomic_folder(output, forbidden=inputs) as partial:
            if adapters is not None:
                adapters.save_pretrained(partial / "adapter")
                adapters.unload()
            for name, parameter in _stored_weights(model, stored):
                parameter.data = parameter.data.to(stored[name])
            with quiet():
                model.save_pretrained(partial)
            carry(ck, partial, ck.layout())
            shutil.copyfile(work / "log.jsonl", partial / "heal.jsonl")
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"cannot write {output}: {error}; the trained state is whole in {work}: make room and go on with --resume"
        ) from error
    shutil.rmtree(work, ignore_errors=True)
