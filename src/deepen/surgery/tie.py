"""Recursive tying: a stretch of n layers becomes K = n / B layers that are visited B times in turn.

    0 1 2 3 4 5      tie(times=2)      (0 2 5)*2          stepwise: K layers spread evenly, both ends kept
                                       (6 7 8)*2          average: 6 is the mean of 0 and 3, 7 of 1 and 4, 8 of 2 and 5
                                       (0 1 2)*2          lower: the first K

Layer l of the stretch is replaced by layer l mod K of the loop. Where the layers l, l + K, l + 2 K ... are equal, all
three give the original model. `stepwise` takes the layers round(j (n - 1) / (K - 1)), the first where K = 1; how the
paper rounds is not known. Stepwise starts best alone, average with adapters (`relax`).

Cost: K layers where there were n; FLOPs, cache slots and depth stay.

Bae et al., Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA, arXiv:2410.20672.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from deepen.checkpoint.computed import layer_tensors, with_layers
from deepen.errors import ProgramError, UsageError, nearest
from deepen.program.normal import normalise
from deepen.program.tree import Ref
from deepen.registry import method
from deepen.surgery.merge import merged_tensor, require_alike
from deepen.surgery.place import joined, stretch, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower

How = Literal["stepwise", "average", "lower"]
HOW = ("stepwise", "average", "lower")


@method(
    "tie",
    family="surgery",
    source="arXiv:2410.20672",
    title="Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA",
    mechanism="n layers become n / B layers in a loop of B turns: spread evenly, averaged, or the first ones",
    cost="1 / B of the parameters of the stretch; FLOPs and cache stay",
)
def tie(
    ck: Checkpoint,
    times: int,
    *,
    how: How = "stepwise",
    first: int | None = None,
    last: int | None = None,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Ties the layers from `first` to `last`, both included, into a loop.

        looped, report = deepen.tie(ck, 3, how="stepwise")

    Args:
        ck: what to change.
        times: turns of the loop; the number of layers is a multiple of it.
        how: `stepwise`, `average` or `lower`.
        first: the first layer of the stretch; None starts with the program.
        last: the last layer of the stretch; None ends with the program.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: an unknown way, or a number of turns that does not divide the number of layers.
        ProgramError: the stretch is not a plain list of whole layers.
        FamilyError: layers that would be tied are of different kinds or shapes.
        CheckpointError: `average` of tensors whose values are codes.
    """
    made, note, groups = tied(ck, times, how, first, last, tower, "")
    merged = dict(groups) if how == "average" else {}
    return made, report(ck, made, tower_key(ck, tower)[0].name, "tie", note, merged=merged)


def tied(
    ck: Checkpoint, times: int, how: str, first: int | None, last: int | None, tower: str, attrs: str
) -> tuple[Checkpoint, str, list[tuple[int, tuple[int, ...]]]]:
    """The tied checkpoint, what was done, and each layer of the loop with the layers that it stands for, by turn.

    Args:
        ck, times, how, first, last, tower: as for `tie`.
        attrs: attributes of the loop, such as `[lora=8]`.
    """
    found, _ = tower_key(ck, tower)
    if how not in HOW:
        raise UsageError(f"tie: no way {how!r}{nearest(how, HOW)}; expected one of {', '.join(HOW)}")
    ends = (_end(ck, tower, 0) if first is None else first, _end(ck, tower, -1) if last is None else last)
    before, refs, after = stretch(ck, tower, *ends, "tie")
    if partial := next((ref for ref in refs if ref.parts and ref.parts != found.parts.letters), None):
        raise UsageError(f"tie: layer {partial.first} is visited in part ({partial.parts}); whole layers are tied")
    layers = [ref.first.value for ref in refs]
    if times < 2 or len(layers) % times:
        raise UsageError(
            f"tie: {len(layers)} layers do not make a loop of {times} turns; expected at least 2, and a divisor of "
            f"{len(layers)}"
        )
    size = len(layers) // times
    groups = [tuple(layers[place::size]) for place in range(size)]
    chosen = _chosen(layers, size, how)
    for group, source in zip(groups, chosen, strict=True):
        require_alike(ck, found, (*group, source), mixed=how == "average")
    if how == "average":
        ck, chosen = _averaged(ck, found, groups)
    made = joined(ck, tower, before, f"({' '.join(map(str, chosen))})*{times}{attrs}", after)
    note = f"tied {len(layers)} layers to {size} in a loop of {times} turns by {how}"
    return made, note, list(zip(chosen, groups, strict=True))


def _end(ck: Checkpoint, tower: str, at: int) -> int:
    """The layer that the program visits first or last."""
    found, key = tower_key(ck, tower)
    item = normalise(ck.program.tree(key), ck.depth[found.name], ck.program.text).items[at]
    if not isinstance(item, Ref):
        place = "begins" if at == 0 else "ends"
        raise ProgramError(
            f"tie: the program {place} with no plain layer; name the first and the last", ck.program.text
        )
    return item.first.value


def _chosen(layers: Sequence[int], size: int, how: str) -> list[int]:
    """The layers that stay, for `lower` and `stepwise`."""
    if how != "stepwise" or size == 1:
        return list(layers[:size])
    return [layers[round(place * (len(layers) - 1) / (size - 1))] for place in range(size)]


def _averaged(ck: Checkpoint, tower: Tower, groups: Sequence[tuple[int, ...]]) -> tuple[Checkpoint, list[int]]:
    """The checkpoint with the mean of each group behind its bank, and the numbers of those layers."""
    numbers = list(range(ck.depth[tower.name], ck.depth[tower.name] + len(groups)))
    made = ck
    for group in groups:
        tensors = {
            name: merged_tensor(ck, tower, group, name, "mean", 0.5) for name in layer_tensors(ck, tower, group[0])
        }
        made = with_layers(made, tower, group[0], [tensors])
    return made, numbers
