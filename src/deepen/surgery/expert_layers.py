"""Splitting the feed-forwards of a checkpoint: real modules to measure with, and the checkpoint with new tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import Computed, layer_tensors, with_tensors
from deepen.checkpoint.recipes import Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import FamilyError, UsageError
from deepen.surgery.narrow import feed_forwards, picked
from deepen.surgery.place import require_layers

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.experts import Experts, Split
    from deepen.checkpoint.family import Tower
    from deepen.checkpoint.widths import FeedForward


@dataclass(frozen=True)
class NewSplit:
    """A feed-forward to split.

    Attributes:
        order: its neurons, expert by expert, [m]; None leaves them where they are.
        router: the tensors of its router, by their names inside it.
        figures: what was measured, by name.
    """

    order: torch.Tensor | None
    router: Mapping[str, torch.Tensor]
    figures: Mapping[str, float]


def chosen_layers(ck: Checkpoint, tower: Tower, layers: Sequence[int] | None, what: str) -> dict[int, FeedForward]:
    """The layers to split with the matrices of their feed-forwards: all that are visited where none are named.

    Raises:
        ProgramError: a layer that does not exist.
        UsageError: a layer that is not visited, or none is named.
        FamilyError: a feed-forward that is not out(act(in x)) or down(act(gate x) * up x).
    """
    visited = sorted({key.layer for key in ck.plan(tower.name).keys})
    if layers is None:
        return feed_forwards(ck, tower, visited)
    require_layers(ck, tower, layers)
    if unseen := sorted(set(layers) - set(visited)):
        raise UsageError(f"{what}: layer {unseen[0]} is not visited in `{ck.program}`")
    if not layers:
        raise UsageError(f"{what}: no layers are named; leave them out to split all that are visited")
    return feed_forwards(ck, tower, sorted(set(layers)))


def measured(ck: Checkpoint, tower: Tower, layer: int, shape: FeedForward, split: Split) -> Experts:
    """The feed-forward of a layer with its weights in fp32, split by the oracle, its neurons in the order of the files.

    Raises:
        UsageError: a split that does not fit the width.
    """
    from deepen.checkpoint.experts import Experts, in_experts
    from deepen.checkpoint.widths import bank_modules

    whole = bank_modules(ck, tower)[layer]
    made = in_experts(whole, shape, replace(split, router="oracle"), f"{ck.where}: layer {layer}")
    found = made.get_submodule(shape.module)
    assert isinstance(found, Experts)
    stem = f"{shape.module}."
    values = {
        name.removeprefix(stem): ck.source.read(full).float()
        for name, full in layer_tensors(ck, tower, layer).items()
        if name.startswith(stem)
    }
    found.load_state_dict(values, assign=True)
    return found.requires_grad_(False).eval()


def reordered(experts: Experts, order: torch.Tensor) -> Experts:
    """The same feed-forward with its neurons in another order; the module itself is changed."""
    from torch import nn

    *inputs, output = experts.maps()
    for each in inputs:
        each.weight = nn.Parameter(each.weight.index_select(0 if isinstance(each, nn.Linear) else 1, order), False)
        if each.bias is not None:
            each.bias = nn.Parameter(each.bias[order], False)
    output.weight = nn.Parameter(output.weight.index_select(1 if isinstance(output, nn.Linear) else 0, order), False)
    return experts


def with_experts(
    ck: Checkpoint, tower: Tower, shapes: Mapping[int, FeedForward], made: Mapping[int, NewSplit], split: Split
) -> Checkpoint:
    """The checkpoint with these feed-forwards split.

    Raises:
        FamilyError: an adapter belongs to them, or they are quantised.
    """
    layers: dict[int, dict[str, Recipe]] = {}
    for layer, new in made.items():
        shape = shapes[layer]
        what = f"splitting the feed-forward of layer {layer}"
        tensors = {} if new.order is None else picked(ck, tower, layer, shape, new.order, what)
        dtype = ck.source.infos[layer_tensors(ck, tower, layer)[f"{shape.output}.weight"]].dtype
        for name, value in new.router.items():
            info = TensorInfo(dtype, tuple(value.shape))
            tensors[f"{shape.module}.router.{name}"] = Computed(info, (), lambda value=value: value, what)
        layers[layer] = tensors
    known = {**ck.experts.get(tower.name, {}), **dict.fromkeys(made, split)}
    return replace(with_tensors(ck, tower, layers), experts={**ck.experts, tower.name: known})


def activate(ck: Checkpoint, active: int, *, layers: Iterable[int] | None = None, tower: str = "") -> Checkpoint:
    """The checkpoint with another number of experts that a token runs; with all of them it is the whole model again.

        half = deepen.activate(split, 6)

    Args:
        ck: a checkpoint with feed-forwards of experts.
        active: how many experts of a feed-forward a token runs.
        layers: stored layers; all that have experts where none are named.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: more than there are, or fewer than one.
        FamilyError: a layer without experts.
        ProgramError: a layer that does not exist.
    """
    found = ck.family.tower(tower)
    known = dict(ck.experts.get(found.name, {}))
    named = sorted(known) if layers is None else list(layers)
    require_layers(ck, found, named)
    if missing := [f"layer {each}" for each in sorted(set(named) - set(known))] if named else ["any layer"]:
        raise FamilyError(
            f"{ck.where}: activate: the feed-forward of {missing[0]} is not split into experts; deepen.moefy or "
            "deepen.factor_llm split it"
        )
    for layer in named:
        known[layer] = replace(known[layer], active=active)
        known[layer].require(known[layer].experts, f"{ck.where}: activate: layer {layer}")
    return replace(ck, experts={**ck.experts, found.name: known})
