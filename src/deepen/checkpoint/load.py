"""Loading: the family's own model class, with its layer lists replaced by visit lists, filled by transformers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from deepen.checkpoint.adapter import apply_adapter
from deepen.checkpoint.experts import Experts
from deepen.checkpoint.family import Tower
from deepen.checkpoint.layer_names import layer_names, quantisation
from deepen.checkpoint.layout import Layout, NewLayer, bank_layers, tensors_of
from deepen.checkpoint.live import LiveConfig
from deepen.checkpoint.owned import owned_sets
from deepen.checkpoint.skeleton import locate
from deepen.checkpoint.slabs import install_slabs
from deepen.checkpoint.visit import VisitList
from deepen.checkpoint.widths import stored_layer
from deepen.errors import CheckpointError, UsageError
from deepen.program import Key, Plan

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, eq=False)
class Spec:
    """What the model class needs to install a program while it is built."""

    checkpoint: Checkpoint
    plans: Mapping[str, Plan]


class Depth:
    """`model.deepen`: the program a model runs, what it recorded, and the counts of its loops."""

    def __init__(self, spec: Spec, lists: Mapping[str, VisitList]) -> None:
        self._spec, self._lists = spec, lists
        self.program = spec.checkpoint.program

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each tower."""
        return self._spec.plans

    @property
    def marks(self) -> dict[str, torch.Tensor]:
        """The stream at each mark of the last pass, [b, t, d]; `tower.name` when there are several towers."""
        single = len(self._lists) == 1
        return {
            mark if single else f"{tower}.{mark}": stream
            for tower, visits in self._lists.items()
            for mark, stream in visits.marks.items()
        }

    @property
    def counts(self) -> dict[str, dict[int, int]]:
        """How often each loop runs, by tower and loop number."""
        return {tower: dict(visits.counts) for tower, visits in self._lists.items()}

    def set_counts(self, counts: Mapping[int, int] | int, tower: str = "") -> None:
        """Chooses the counts of the run-time loops `n..m`, between generations.

        Args:
            counts: by loop number, or one number for all run-time loops.
            tower: the tower; may be left out when the model has a default one.

        Raises:
            UsageError: the program has no run-time loop.
            ProgramError: an unknown loop or a count outside its range.
        """
        name = self._spec.checkpoint.family.tower(tower).name
        loops = [loop.number for loop in self.plans[name].loops if loop.minimum != loop.maximum]
        if not loops:
            raise UsageError(f"the program {self.program} has no loop n..m whose count could be chosen")
        self._lists[name].set_counts(dict.fromkeys(loops, counts) if isinstance(counts, int) else counts)

    def keys(self, tower: str = "") -> dict[str, Key]:
        """Which layer of the opened checkpoint each child of the layer list is."""
        name = self._spec.checkpoint.family.tower(tower).name
        return {str(index): key for index, key in enumerate(self.plans[name].keys)}

    def layout(self) -> Layout:
        return self._spec.checkpoint.layout()


class Deepened(PreTrainedModel):
    """Mixed into a family's model class: builds the bank instead of the plain layer list, and saves it back."""

    deepen: Depth

    def __init__(self, config: Any, *args: Any, deepen_spec: Spec, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        lists = {
            tower.name: install(self, tower, deepen_spec.plans[tower.name], deepen_spec.checkpoint)
            for tower in deepen_spec.checkpoint.family.towers
        }
        self.deepen = Depth(deepen_spec, lists)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Writes the bank once and the config of the form that `deepen.open(...).save(...)` would choose."""
        from deepen.checkpoint.save import write_config

        super().save_pretrained(save_directory, *args, **kwargs)
        write_config(
            Path(save_directory), self.deepen.layout().config, {"dtype": str(self.dtype).removeprefix("torch.")}
        )


@cache
def deepened(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The family's class with `Deepened` mixed in; it keeps the name, so configs and logs read as before."""
    return type(base.__name__, (Deepened, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def install(model: nn.Module, tower: Tower, plan: Plan, ck: Checkpoint) -> VisitList:
    """Replaces the tower's layer list by the bank of `plan`; returns it."""
    path = locate(model, tower, ck.skeleton.depth(tower), ck.where)
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    originals: nn.ModuleList = getattr(owner, name)
    bank = ck.banks[tower.name]
    live = LiveConfig(model, owner, ck.family, tower, bank, len(originals), ck.where)
    sets = {name: owned.module() for name, owned in owned_sets(ck, tower).items()}
    visits = VisitList(_bank(originals, tower, plan, ck), plan, tower, live, sets)
    setattr(owner, name, visits)
    install_slabs(model, tower, len(originals), visits, ck.where)
    for attribute, value in tower.neutral.items():
        if hasattr(owner, attribute):
            setattr(owner, attribute, value)
    return visits


def _bank(originals: nn.ModuleList, tower: Tower, plan: Plan, ck: Checkpoint) -> list[nn.Module]:
    """One module a key, built as the original class built the layer it comes from."""
    bank = ck.banks[tower.name]
    used: set[int] = set()
    modules = []
    for key in plan.keys:
        origin = bank[key.layer]
        layer = copy.deepcopy(originals[origin]) if origin in used else originals[origin]
        modules.append(stored_layer(ck, tower, key.layer, layer))
        used.add(origin)
    _place_first(originals[0], modules, tower.first)
    return modules


def _place_first(owner: nn.Module, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Moves what only the first layer executed may own, a relative bias, to the first of `modules`."""
    present = dict(owner.named_parameters())
    special = {name.rsplit(".", 1)[0] for name in names if name in present}
    held = {path: owner.get_submodule(path) for path in special}
    for index, layer in enumerate(modules):
        for path, module in held.items():
            at, _, leaf = path.rpartition(".")
            place = layer.get_submodule(at)
            if index == 0:
                setattr(place, leaf, module)
            elif hasattr(place, leaf):
                delattr(place, leaf)
            flag = "has_relative_attention_bias"
            if hasattr(place, flag):
                setattr(place, flag, index == 0)


def load(
    ck: Checkpoint, *, dtype: Any = None, device: str = "cpu", attn_implementation: str | None = None
) -> PreTrainedModel:
    """See `Checkpoint.load`."""
    ck.require_executable()
    plans = {tower.name: ck.plan(tower.name) for tower in ck.family.towers}
    banks = {name: bank_layers(plan) for name, plan in plans.items()}
    recipes = tensors_of(ck, banks) | ck.owned_tensors
    tensors = {name: recipe.compute(ck.source) for name, recipe in recipes.items()}
    with quiet():
        model, info = deepened(ck.skeleton.model_class).from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            None,
            config=bank_config(ck, banks),
            state_dict=tensors,
            dtype=dtype or "auto",
            output_loading_info=True,
            attn_implementation=attn_implementation,
            deepen_spec=Spec(ck, plans),
        )
    _check_loaded(ck, info)
    for module in model.modules():
        if isinstance(module, Experts):
            module.lay_out()
    apply_adapter(ck, model, banks)
    if model.can_generate():
        model.generation_config = generation_config(ck, model)
        if not any(plan.slots for name, plan in plans.items() if ck.family.tower(name).caches):
            model.generation_config.use_cache = False
    # What other libraries show and look up as the model's origin.
    model.name_or_path = model.config._name_or_path = ck.where
    return model.to(device).eval()


def bank_config(ck: Checkpoint, banks: Mapping[str, Sequence[NewLayer]]) -> Any:
    """A copy of the original config whose quantisation names the modules of the bank."""
    config: Any = copy.deepcopy(ck.skeleton.config)
    if getattr(config, "quantization_config", None):
        names = layer_names(ck, banks)
        config.quantization_config = quantisation(ck.config, names)["quantization_config"]
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the loading report and progress bars of transformers; what matters in them is checked and raised."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def generation_config(ck: Checkpoint, model: PreTrainedModel) -> GenerationConfig:
    if ck.folder is not None and (ck.folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(ck.folder)
    return model.generation_config


def load_tokenizer(ck: Checkpoint) -> PreTrainedTokenizerBase:
    """See `Checkpoint.tokenizer`."""
    if ck.gguf is not None:
        from deepen.checkpoint.gguf import gguf_tokenizer

        return gguf_tokenizer(ck.gguf)
    if ck.folder is None or not any((ck.folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{ck.where}: no tokenizer beside the weights; expected one of {', '.join(TOKENIZER_FILES)}"
        )
    return AutoTokenizer.from_pretrained(ck.folder)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def _check_loaded(ck: Checkpoint, info: Mapping[str, Any]) -> None:
    """A missing, mismatched or unexpected key is the way most silent faults hide, so each is an error."""
    for kind, meaning in (
        ("missing_keys", "the model needs tensors that the files do not hold"),
        ("mismatched_keys", "tensors have other shapes than the model"),
        ("unexpected_keys", "the files hold tensors that the model does not use"),
        ("error_msgs", "transformers could not load"),
    ):
        if found := info.get(kind):
            names = ", ".join(sorted(str(name) for name in found)[:5])
            raise CheckpointError(f"{ck.where}: {meaning}: {names}{' ...' if len(found) > 5 else ''}")
