"""Tensors that are computed from those of the files: a source over another source, and layers that are made of it.

    files            model.layers.0 ... model.layers.29
    ComputedSource   model.layers.0 ... model.layers.29  model.layers.30 <- recipes over the files

A computed layer stands behind the stored ones in the bank and is a layer like any other from there on. Nothing is
computed before a tensor is read, and a save streams it like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deepen.checkpoint.recipes import NUMBERS, Copy, Recipe, check_computed, info, rounded
from deepen.checkpoint.sources import ByteRange, Source, TensorInfo
from deepen.errors import CheckpointError, FamilyError

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower


@dataclass(frozen=True, eq=False, slots=True)
class Computed:
    """A function of other recipes, computed wide and rounded once.

    Attributes:
        result: type and shape of the result.
        inputs: what the function gets, in fp32, or in fp64 where the result is F32 or F64.
        function: makes the result from the inputs; it must not write to them.
        what: what it does, for errors.
    """

    result: TensorInfo
    inputs: tuple[Recipe, ...]
    function: Callable[..., torch.Tensor]
    what: str

    def __post_init__(self) -> None:
        for dtype in (self.result.dtype, *(recipe.dtype for recipe in self.inputs)):
            if dtype not in NUMBERS:
                raise CheckpointError(
                    f"{self.what}: a tensor of type {dtype} holds codes, not numbers; only {', '.join(NUMBERS)} can be "
                    "computed with: dequantise first"
                )

    @property
    def dtype(self) -> str:
        return self.result.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.result.shape

    def range(self, source: Source) -> ByteRange | None:
        return None

    def compute(self, source: Source) -> torch.Tensor:
        """The result.

        Raises:
            CheckpointError: a finite value would overflow its type.
        """
        import torch

        wide = torch.float64 if self.dtype in ("F32", "F64") else torch.float32
        made = self.function(*(recipe.compute(source).to(wide) for recipe in self.inputs))
        return rounded(made, self.dtype, self.what)


@dataclass(frozen=True, eq=False)
class ComputedSource:
    """A source with further tensors, or others of the same name, each made by a recipe over the source below.

    Attributes:
        base: the source below.
        recipes: by name.
        hidden: tensors of the source below that this one no longer has.
    """

    base: Source
    recipes: Mapping[str, Recipe]
    hidden: frozenset[str] = frozenset()

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        kept = {name: found for name, found in self.base.infos.items() if name not in self.hidden}
        return {**kept, **{name: info(recipe) for name, recipe in self.recipes.items()}}

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.base.metadata

    @property
    def files(self) -> tuple[Path, ...]:
        return self.base.files

    def range(self, name: str) -> ByteRange | None:
        return self.recipes[name].range(self.base) if name in self.recipes else self.base.range(name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own on the CPU.

        Raises:
            CheckpointError: no such tensor, or it cannot be computed.
        """
        if name not in self.recipes:
            return self.base.read(name)
        tensor = self.recipes[name].compute(self.base)
        check_computed(name, self.recipes[name], tensor)
        return tensor


def computed_names(source: Source) -> frozenset[str]:
    """The tensors of a source that no file holds."""
    if not isinstance(source, ComputedSource):
        return frozenset()
    made = {name for name, recipe in source.recipes.items() if recipe.range(source.base) is None}
    return computed_names(source.base) | made


def with_layer(
    ck: Checkpoint, tower: Tower, origin: int, tensors: Mapping[str, Recipe], width: int | None = None
) -> Checkpoint:
    """The checkpoint with one more layer behind its bank; the program stays as it is.

    Args:
        ck: where the layer comes from.
        tower: the tower that gets it.
        origin: the stored layer whose kind and settings it has.
        tensors: a recipe over `ck.source` for every tensor, by its name inside the layer.
        width: its feed-forward width where that is not the width of `origin`.

    Raises:
        FamilyError: the checkpoint has what no computed layer can have a share in.
    """
    return with_layers(ck, tower, origin, [tensors], width)


def with_layers(
    ck: Checkpoint, tower: Tower, origin: int, layers: Sequence[Mapping[str, Recipe]], width: int | None = None
) -> Checkpoint:
    """The checkpoint with more layers behind its bank, all of one kind; see `with_layer`."""
    _refuse_shares(ck, tower)
    for tensors in layers:
        _refuse_mixed_experts(ck, tower, origin, tensors)
    numbers = range(ck.depth[tower.name], ck.depth[tower.name] + len(layers))
    prefix = ck.disk[tower.name].prefix
    recipes = {
        f"{prefix}.{number}.{name}": recipe
        for number, tensors in zip(numbers, layers, strict=True)
        for name, recipe in tensors.items()
    }
    width = ck.widths.get(tower.name, {}).get(origin) if width is None else width
    widths = {} if width is None else {tower.name: {**ck.widths.get(tower.name, {}), **dict.fromkeys(numbers, width)}}
    known = ck.factors.get(tower.name, {})
    factors = {tower.name: {**known, **dict.fromkeys(numbers, known[origin])}} if origin in known else {}
    split = ck.experts.get(tower.name, {})
    experts = {tower.name: {**split, **dict.fromkeys(numbers, split[origin])}} if origin in split else {}
    return replace(
        ck,
        source=ComputedSource(ck.source, recipes),
        banks={**ck.banks, tower.name: (*ck.banks[tower.name], *[ck.banks[tower.name][origin]] * len(layers))},
        made={**ck.made, tower.name: ck.made.get(tower.name, 0) + len(layers)},
        widths={**ck.widths, **widths},
        factors={**ck.factors, **factors},
        experts={**ck.experts, **experts},
    )


def with_tensors(
    ck: Checkpoint, tower: Tower, layers: Mapping[int, Mapping[str, Recipe]], hidden: Iterable[str] = ()
) -> Checkpoint:
    """The checkpoint with other tensors in stored layers; the bank and the program stay as they are.

    Args:
        ck: what to change.
        tower: the tower of the layers.
        layers: for each stored layer that changes, a recipe over `ck.source` for each tensor that does, by its name
            inside the layer.
        hidden: full names of tensors that go.

    Raises:
        FamilyError: an adapter belongs to the old tensors, or they are quantised.
    """
    refuse_foreign(ck, tower)
    prefix = ck.disk[tower.name].prefix
    recipes = {
        f"{prefix}.{layer}.{name}": recipe for layer, tensors in layers.items() for name, recipe in tensors.items()
    }
    return replace(ck, source=ComputedSource(ck.source, recipes, frozenset(hidden)))


def layer_tensors(ck: Checkpoint, tower: Tower, layer: int) -> dict[str, str]:
    """The tensors of a stored layer, by their name inside it, without what only the first layer may own."""
    return {name: full for name, full in ck.disk[tower.name].layers[layer].items() if name not in tower.first}


def refuse_foreign(ck: Checkpoint, tower: Tower) -> None:
    """Refuses a checkpoint whose weights cannot be computed with.

    Raises:
        FamilyError: an adapter belongs to them, or they are quantised.
    """
    _refuse(
        ck,
        tower,
        (bool(ck.adapter), f"the adapter in {ck.adapter} belongs to the stored layers; merge it into the model first"),
        (bool(ck.config.get("quantization_config")), "its weights are quantised; dequantise the model first"),
    )


def _refuse_shares(ck: Checkpoint, tower: Tower) -> None:
    refuse_foreign(ck, tower)
    _refuse(
        ck,
        tower,
        (bool(ck.disk[tower.name].ahead), "it numbers layers that predict further tokens behind the last one"),
        (bool(tower.slabs), f"{tower.slabs[0].name if tower.slabs else ''} holds one block a layer outside the layers"),
        (
            any(ck.config.get(name) for name in ck.family.folds_index),
            f"its attention divides by the number of the layer ({', '.join(ck.family.folds_index)})",
        ),
    )


def _refuse_mixed_experts(ck: Checkpoint, tower: Tower, origin: int, tensors: Mapping[str, Recipe]) -> None:
    """Refuses to compute with the matrices that a feed-forward of experts reads with."""
    from deepen.checkpoint.experts import Experts
    from deepen.checkpoint.widths import bank_modules

    if origin not in ck.experts.get(tower.name, {}):
        return
    for path, module in bank_modules(ck, tower)[origin].named_modules():
        if isinstance(module, Experts):
            mixed = any(not isinstance(tensors.get(f"{path}.{name}.weight"), Copy) for name in module.inputs)
            reason = (
                f"the neurons of {path} of layer {origin} lie expert by expert, unlike those of other layers; split"
            )
            _refuse(ck, tower, (mixed, f"{reason} feed-forwards last"))


def _refuse(ck: Checkpoint, tower: Tower, *reasons: tuple[bool, str]) -> None:
    for refused, reason in reasons:
        if refused:
            raise FamilyError(f"{ck.where}: the {tower.name} tower cannot get a computed layer: {reason}")
