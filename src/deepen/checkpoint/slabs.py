"""Tensors outside the layers that hold one block a layer, such as Gemma 3n's per-layer embeddings.

    embed_tokens_per_layer.weight    [vocabulary, depth * width]       gives a block a layer
    contact_head.regression.weight   [1, depth * heads]                reads a block a layer

A running model keeps the blocks of its bank, each once, and spreads what they give over the visits; a file holds the
blocks of the layers that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from deepen.checkpoint.family import Slab, Tower
from deepen.checkpoint.recipes import Blocks, Recipe
from deepen.checkpoint.visit import VisitList
from deepen.errors import FamilyError


def slab_of(tower: Tower, name: str) -> Slab | None:
    """The slab of the tower that a tensor of this full name is."""
    return next((slab for slab in tower.slabs if f".{name}".endswith(f".{slab.name}")), None)


def cut_slab(recipe: Recipe, slab: Slab, stored: Sequence[int], depth: int) -> Recipe:
    """The blocks of the layers `stored` out of `depth`; the recipe itself where these are all of them in order."""
    return recipe if list(stored) == list(range(depth)) else Blocks(recipe, slab.axis, depth, tuple(stored))


def slab_shape(shape: Sequence[int], slab: Slab, depth: int, layers: int) -> tuple[int, ...]:
    """The shape of a slab of `depth` blocks once it has `layers` of them."""
    changed = list(shape)
    changed[slab.axis] = changed[slab.axis] // depth * layers
    return tuple(changed)


def install_slabs(model: nn.Module, tower: Tower, depth: int, visits: VisitList, where: str) -> None:
    """Gives the model's slabs one block a layer of the bank, and their modules one block a visit.

    Raises:
        FamilyError: the model has no such tensor, or its axis is not a multiple of the depth.
    """
    bank = len(visits.plan.keys)
    for slab in tower.slabs:
        path, _, leaf = slab.name.rpartition(".")
        found = [module for name, module in model.named_modules() if f".{name}".endswith(f".{path}")]
        if not found:
            continue  # a model without the head or the embedding
        tensor = getattr(found[0], leaf)
        if len(found) > 1 or tensor.shape[slab.axis] % depth:
            raise FamilyError(f"{where}: {slab.name} of {type(model).__name__} does not hold one block a layer")
        shape = slab_shape(tensor.shape, slab, depth, bank)
        setattr(found[0], leaf, nn.Parameter(tensor.new_empty(shape), requires_grad=tensor.requires_grad))
        for attribute, size in _sizes(found[0], slab, shape).items():
            setattr(found[0], attribute, size)
        if slab.reads:
            found[0].register_forward_pre_hook(lambda module, args: (_gathered(args[0], visits), *args[1:]))
        else:
            found[0].register_forward_hook(lambda module, args, output: _spread(output, visits))


def _sizes(module: nn.Module, slab: Slab, shape: Sequence[int]) -> Mapping[str, int]:
    """The attributes in which a module repeats the length of the axis."""
    names = ("in_features",) if slab.reads else ("out_features", "embedding_dim")
    return {name: shape[slab.axis] for name in names if hasattr(module, name)}


def _order(visits: VisitList) -> list[int]:
    return [int(entry.child) for entry in visits.entries]


def _spread(output: torch.Tensor, visits: VisitList) -> torch.Tensor:
    """From [..., bank * width] to [..., visits * width]."""
    order, bank = _order(visits), len(visits.plan.keys)
    if order == list(range(bank)):
        return output
    return output.unflatten(-1, (bank, -1))[..., order, :].flatten(-2)


def _gathered(given: torch.Tensor, visits: VisitList) -> torch.Tensor:
    """From [..., visits * width] to [..., bank * width]: what visits of one layer give is added up."""
    order, bank = _order(visits), len(visits.plan.keys)
    if order == list(range(bank)):
        return given
    blocks = given.unflatten(-1, (len(order), -1))
    total = blocks.new_zeros(*blocks.shape[:-2], bank, blocks.shape[-1])
    return total.index_add(-2, torch.tensor(order, device=given.device), blocks).flatten(-2)
