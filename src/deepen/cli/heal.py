"""`deepen heal`: train a cut, looped or merged checkpoint on a text of yours, and save it as what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, note, pairs, print_json
from deepen.cli.progress import Step, progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.train.heal import Healed
    from deepen.train.log import Entry

Mode = Literal["full", "lora", "layers", "owned", "fim", "inflection", "slicefine", "losia", "slam", "spu"]

# Lines of the training loss that a run prints, at most.
LINES = 20


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Select:
    """Options of the selective modes; without a value, that of the mode."""

    count: Annotated[int | None, Parameter(help="Layers to choose; of --mode fim (3) or slam (6).")] = None
    width: Annotated[int | None, Parameter(help="Of a slice; of --mode slicefine (8).")] = None
    order: Annotated[
        Literal["columns", "rows", "alternating", "random"] | None,
        Parameter(help="How slices move; of --mode slicefine (columns)."),
    ] = None
    every: Annotated[int | None, Parameter(help="Steps to a move; of --mode slicefine (500) or losia (100).")] = None
    share: Annotated[float | None, Parameter(help="Trained of a matrix; of --mode losia (0.125) or spu (0.1).")] = None
    other: Annotated[tuple[str, ...], Parameter(negative="", help="Texts in other languages; of --mode slam.")] = ()


SELECT = Select()


def heal(
    model: str,
    program: str = "",
    /,
    *,
    data: Annotated[str, Parameter(help="A UTF-8 text file; its last part is held out.")],
    output: Annotated[str, Parameter(name=["--output", "-o"], help="A folder that does not exist yet.")],
    steps: Annotated[int | None, Parameter(help="Updates; 200 by default.")] = None,
    tokens: Annotated[int | None, Parameter(help="Tokens to train on, in place of --steps.")] = None,
    mode: Annotated[Mode, Parameter(help="What is trained.")] = "full",
    layers: Annotated[
        str, Parameter(help="Layers to train, such as 3,5-7 or 3!1; of all modes but full, fim, inflection.")
    ] = "",
    rank: Annotated[int, Parameter(help="Of LoRA.")] = 8,
    keep_adapter: Annotated[bool, Parameter(negative="", help="Save LoRA beside the weights, not merged.")] = False,
    distil: Annotated[float, Parameter(help="Weight of the teacher's predictions, 0 to 1.")] = 0.0,
    temperature: Annotated[float, Parameter(help="Of the distillation.")] = 1.0,
    distil_hidden: Annotated[float, Parameter(help="Weight of the streams at marks of both programs.")] = 0.0,
    teacher: Annotated[str, Parameter(help="Another model to learn from.")] = "",
    teacher_program: Annotated[str, Parameter(help="The program of the teacher.")] = "",
    turns: Annotated[
        int | None, Parameter(help="Draw the count of loops n..m in each step: 1 and a number of this mean.")
    ] = None,
    turns_share: Annotated[float, Parameter(help="Share of the steps over which the mean rises from 1.")] = 0.25,
    turns_shape: Annotated[Literal["linear", "1-sqrt"], Parameter(help="How the mean rises.")] = "linear",
    lr: Annotated[float, Parameter(help="The highest learning rate.")] = 1e-4,
    warmup: Annotated[int, Parameter(help="Steps over which the rate rises to it.")] = 10,
    weight_decay: Annotated[float, Parameter(help="Of AdamW; norms and biases have none.")] = 0.01,
    clip: Annotated[float, Parameter(help="The largest norm of the gradient.")] = 1.0,
    batch: Annotated[int, Parameter(help="Windows of an update.")] = 8,
    accumulate: Annotated[int, Parameter(help="Pieces that a batch is read in, to save memory.")] = 1,
    context: Annotated[int, Parameter(help="Tokens of a window.")] = 512,
    held_out: Annotated[float, Parameter(help="Share of the text that is not trained on.")] = 0.1,
    held_out_tokens: Annotated[int, Parameter(help="Tokens of it to read, at most.")] = 8192,
    autocast: Annotated[bool, Parameter(negative="", help="Compute matrix products in bfloat16.")] = False,
    gradient_checkpointing: Annotated[bool, Parameter(negative="", help="Less memory, more time.")] = False,
    seed: Annotated[int, Parameter(help="Of the order of the text and of all draws.")] = 0,
    eval_every: Annotated[int, Parameter(help="Steps between looks at the held-out text; 0 never.")] = 50,
    save_every: Annotated[int, Parameter(help="Steps between states on disk; 0 only at the end.")] = 50,
    resume: Annotated[bool, Parameter(negative="", help="Go on with the run of the same -o.")] = False,
    select: Select = SELECT,
    common: Common = DEFAULT,
) -> None:
    """Train a cut, looped or merged checkpoint on your text, and save it as what it was.

    The last part of the text is held out; the loss on it is given before and after, with the difference and its 95 %
    interval over windows. --distil also learns from the whole model, or from --teacher.

    --mode fim trains the layers with the largest Fisher information, inflection puts LoRA into the layers of narrow
    attention and steep gradients, slicefine trains a moving slice of every matrix, losia moving subnets of them, slam
    the feed-forwards of layers that differ between languages, spu single entries of the feed-forwards.

    While it runs, log and state are in DIR.healing; a run that was stopped or killed goes on with --resume. --dtype is
    the type to train in, float32 by default; the weights are saved in the type they had.
    Several processes share it under torchrun: torchrun --nproc-per-node 4 -m deepen heal MODEL ...

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    program
        The program to heal; the model's own when none is given.
    """
    from deepen.program import read_program
    from deepen.train.curriculum import Curriculum
    from deepen.train.distributed import joined
    from deepen.train.recipe import Recipe
    from deepen.train.selective.choice import Choice

    if teacher_program and not teacher:
        raise UsageError("--teacher-program is about --teacher: name the model")
    if (teacher or temperature != 1.0) and not (distil or distil_hidden):
        raise UsageError("--teacher and --temperature are about distillation: give --distil or --distil-hidden")
    recipe = Recipe(
        steps=steps_of(steps, tokens, batch * context),
        batch=batch,
        accumulate=accumulate,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        autocast=autocast,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
        eval_every=eval_every,
        save_every=save_every,
    )
    text = read_text(data)
    opened = deepen.open(model)
    checkpoint = opened.apply(read_program(program, common.form)) if program else opened
    master = None
    if teacher:
        master = deepen.open(teacher)
        if teacher_program:
            master = master.apply(read_program(teacher_program, common.form))
    elif (distil or distil_hidden) and checkpoint.program != opened.program:
        master = opened
    device = common.torch_device()
    with joined(device) as processes:
        healing = partial(
            deepen.heal,
            checkpoint,
            text,
            output,
            recipe=recipe,
            mode=mode,
            layers=layer_numbers(layers),
            rank=rank,
            choice=Choice(
                count=select.count,
                width=select.width,
                order=select.order,
                every=select.every,
                share=select.share,
                others=tuple(read_text(each) for each in select.other),
            ),
            distil=distil,
            temperature=temperature,
            hidden=distil_hidden,
            teacher=master,
            curriculum=Curriculum(mean=turns, share=turns_share, shape=turns_shape) if turns is not None else None,
            context=context,
            held_out=held_out,
            held_out_tokens=held_out_tokens,
            device=device,
            dtype=common.torch_dtype(),
            resume=resume,
            keep_adapter=keep_adapter,
            processes=processes,
        )
        if not processes.first:
            healing()
            return
        with progress(f"healing {output}", recipe.steps, "steps") as step:
            try:
                healed = healing(report=reporter(step, recipe.steps))
            except KeyboardInterrupt:
                note(f"a state that was saved is in {output}.healing; go on with the same command and --resume")
                raise
    if common.json:
        print_json({"model": model, "data": data, "output": output} | healed.to_json())
    else:
        print(describe(healed, output))


def steps_of(steps: int | None, tokens: int | None, step_tokens: int) -> int:
    """The updates that `--steps` or `--tokens` ask for.

    Raises:
        UsageError: both, or too few tokens.
    """
    if steps is not None and tokens is not None:
        raise UsageError("--steps and --tokens both say how long to train: give one")
    if tokens is None:
        return 200 if steps is None else steps
    if tokens < 1:
        raise UsageError(f"--tokens {tokens}: expected 1 or more")
    return math.ceil(tokens / max(1, step_tokens))


def layer_numbers(text: str) -> tuple[int | str, ...]:
    """The layers that `--layers` names, such as 3,5-7, and copies, such as 3!1.

    Raises:
        UsageError: not numbers, or a range that ends before it begins.
    """
    found: list[int] = []
    copies: list[str] = []
    for piece in (piece.strip() for piece in text.split(",") if text):
        first, dash, last = piece.partition("-")
        number, mark, label = piece.partition("!")
        if mark and number.isdecimal() and label.replace("_", "").isalnum():
            copies.append(piece)
            continue
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"--layers {text}: expected numbers, ranges and copies such as 3,5-7,3!1, got {piece!r}")
        found += range(int(first), int(last if dash else first) + 1)
    return *sorted(set(found)), *dict.fromkeys(copies)


def reporter(step: Step, steps: int) -> Callable[[Entry], None]:
    """Counts the steps, and says the loss every now and then and whenever the held-out text was read."""
    every = max(1, steps // LINES)
    first: int | None = None

    def report(entry: Entry) -> None:
        nonlocal first
        first = first or entry.step
        # of a resumed run only what is left is counted, or the rate would be that of steps it did not do
        step(1, steps - first + 1)
        if entry.held_out is not None or entry.step % every == 0:
            looked = "" if entry.held_out is None else f", held out {entry.held_out:.4f}"
            rate = f"{amount(entry.tokens_per_second)} tokens/s"
            note(f"step {entry.step}/{steps}: loss {entry.loss:.4f}{looked}, {rate}")

    return report


def describe(healed: Healed, output: str) -> str:
    """The result as text for people."""
    moved = healed.difference
    rows = [
        ("program", healed.program),
        ("trained", f"{amount(healed.parameters)} parameters, {healed.steps} steps, {amount(healed.tokens)} tokens"),
        *([("layers", ", ".join(map(str, healed.layers)))] if healed.layers else []),
        ("held-out loss", f"{_loss(healed.before)} -> {_loss(healed.after)} nats a token"),
        ("difference", f"{moved.value:+.4f} ({moved.low:+.4f} to {moved.high:+.4f}, 95 %, {moved.windows} windows)"),
        ("perplexity", f"{amount(healed.before.perplexity)} -> {amount(healed.after.perplexity)}"),
        ("written", str(Path(output))),
    ]
    return pairs(rows)


def _loss(found: deepen.Evaluation) -> str:
    return f"{found.nll / found.tokens:.4f}"
