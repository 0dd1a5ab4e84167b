"""Make one layer of several: tensor by tensor their mean, a point on the line between two, or on the arc between two.

    mean     W = W_i + mean_j (W_j - W_i)
    lerp     W = W_i + t (W_j - W_i)
    slerp    W = sin((1 - t) a) / sin a W_i + sin(t a) / sin a W_j       a: the angle between W_i and W_j as vectors

    0-11   merge(5, 6)   ->   0-4 12 7-11          12: the new layer, behind the bank

The arc keeps the norm that the line loses between vectors that point apart. Where they are nearly parallel, opposite or
zero the arc is not defined well and slerp is lerp. Layers that are equal merge to themselves, exactly.

Computed wide and rounded once. Cost: one layer where there were several.

Linear and spherical interpolation of weights as in mergekit (Goddard et al., arXiv:2403.13257); merging neighbouring
layers: Yang, Cao, Zhao, LaCo, arXiv:2402.11187; the arc: Shoemake, Animating Rotation with Quaternion Curves, 1985.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from deepen.checkpoint.computed import Computed, layer_tensors, with_layer
from deepen.checkpoint.recipes import NUMBERS, Copy, Recipe
from deepen.errors import FamilyError, UsageError, nearest
from deepen.registry import method
from deepen.surgery.place import joined, require_run, stretch, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower

How = Literal["mean", "lerp", "slerp"]
HOW = ("mean", "lerp", "slerp")
# Beyond this cosine two vectors count as parallel.
PARALLEL = 0.9995


@method(
    "merge",
    family="surgery",
    source="arXiv:2402.11187",
    title="LaCo: Large Language Model Pruning via Layer Collapse",
    mechanism="several layers become one: mean, linear or spherical interpolation of each tensor",
    cost="one layer where there were several",
)
def merge(
    ck: Checkpoint, first: int, last: int, *, how: How = "mean", weight: float = 0.5, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Puts one layer in the place of the layers from `first` to `last`, both included.

        merged, report = deepen.merge(ck, 5, 6, how="slerp", weight=0.5)

    Args:
        ck: what to change.
        first: the first layer of the stretch.
        last: the last layer of the stretch; the next one for `lerp` and `slerp`.
        how: `mean`, `lerp` or `slerp`.
        weight: share of the second layer, from 0 to 1; `lerp` and `slerp` only.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: an unknown way, a weight outside of 0 to 1, or more than two layers for `lerp` and `slerp`.
        ProgramError: the layers do not stand once each, in this order and in full, outside of groups and loops.
        FamilyError: layers of different kinds or shapes, or with experts, which are in no common order.
        CheckpointError: tensors whose values are codes.
    """
    found, _ = tower_key(ck, tower)
    require_run(ck, found, first, last)
    if how not in HOW:
        raise UsageError(f"merge: no way {how!r}{nearest(how, HOW)}; expected one of {', '.join(HOW)}")
    if not 0 <= weight <= 1:
        raise UsageError(f"merge: the weight is a share from 0 to 1, got {weight}")
    before, refs, after = stretch(ck, tower, first, last, "merge")
    layers = [ref.first.value for ref in refs]
    if how != "mean" and len(layers) != 2:
        raise UsageError(f"merge: {how} is between two layers, got {len(layers)}; use mean")
    if partial := next((ref for ref in refs if ref.parts and ref.parts != found.parts.letters), None):
        raise UsageError(
            f"merge: layer {partial.first} is visited in part ({partial.parts}); a merged layer is visited in full"
        )
    require_alike(ck, found, layers)
    tensors = {
        name: merged_tensor(ck, found, layers, name, how, weight) for name in layer_tensors(ck, found, layers[0])
    }
    number = ck.depth[found.name]
    made = joined(with_layer(ck, found, layers[0], tensors), tower, before, str(number), after)
    told = f"merged layers {', '.join(map(str, layers))} into layer {number} by {how}"
    note = told if how == "mean" else f"{told} at {weight:g}"
    return made, report(ck, made, found.name, "merge", note, merged={number: tuple(layers)})


def require_alike(ck: Checkpoint, tower: Tower, layers: Sequence[int], mixed: bool = True) -> None:
    """Refuses layers that are not of one kind, and, where their weights are `mixed`, layers with experts.

    Raises:
        FamilyError: names the layers and what differs.
    """
    from deepen.checkpoint.skeleton import settings
    from deepen.checkpoint.widths import bank_modules

    modules = bank_modules(ck, tower)
    names = [layer_tensors(ck, tower, layer).keys() for layer in layers]
    for layer, own in zip(layers, names, strict=True):
        if mixed and (experts := next((name for name in sorted(own) if "expert" in name), None)):
            raise FamilyError(
                f"{ck.where}: layer {layer} has experts ({experts}), which stand in another order in each layer; "
                "merging them expert by expert would mix unrelated ones"
            )
        one, other = settings(modules[layers[0]]), settings(modules[layer])
        differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        if own != names[0] or differing:
            name = differing[0] if differing else min(own ^ names[0])
            raise FamilyError(
                f"{ck.where}: layers {layers[0]} and {layer} are of different kinds: {name or 'its class'} is "
                f"{one.get(name)!r} in one and {other.get(name)!r} in the other; only layers of one kind can be one"
            )


def merged_tensor(ck: Checkpoint, tower: Tower, layers: Sequence[int], name: str, how: How, weight: float) -> Recipe:
    """The recipe of a tensor of several layers, by its name inside them."""
    from deepen.checkpoint.widths import bank_modules

    infos = ck.source.infos
    full = [layer_tensors(ck, tower, layer)[name] for layer in layers]
    copies = tuple(Copy(each, infos[each]) for each in full)
    buffers = {buffer for buffer, _ in bank_modules(ck, tower)[layers[0]].named_buffers()}
    if name in buffers and copies[0].dtype not in NUMBERS:
        # A mask of bits or a counter: the same in every layer.
        return copies[0]
    what = f"merging {full[0]} and {', '.join(full[1:])}"
    if how == "mean":
        return Computed(copies[0].info, copies, mean, what)
    between = lerp if how == "lerp" else slerp
    return Computed(copies[0].info, copies, lambda one, two: between(one, two, weight), what)


def mean(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The mean of tensors of one shape; of equal ones it is exactly theirs."""
    apart = [other - first for other in others]
    return first + sum(apart[1:], apart[0]) / (1 + len(others))


def lerp(one: torch.Tensor, two: torch.Tensor, weight: float) -> torch.Tensor:
    """The point on the line from `one` (weight 0) to `two` (weight 1)."""
    return two if weight == 1 else one + weight * (two - one)


def slerp(one: torch.Tensor, two: torch.Tensor, weight: float) -> torch.Tensor:
    """The point on the arc from `one` (weight 0) to `two` (weight 1); on the line where the two are parallel."""
    import torch

    lengths = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in (one, two)]
    if min(lengths) == 0:
        return lerp(one, two, weight)
    cosine = ((one.double() / lengths[0]) * (two.double() / lengths[1])).sum().item()
    if abs(cosine) > PARALLEL:
        return lerp(one, two, weight)
    angle = math.acos(cosine)
    shares = (math.sin((1 - weight) * angle) / math.sin(angle), math.sin(weight * angle) / math.sin(angle))
    return shares[0] * one + shares[1] * two
