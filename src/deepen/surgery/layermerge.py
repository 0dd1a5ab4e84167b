r"""Merge runs of layers, drop some, keep the rest: the best choice under a budget, found exactly.

    segment (s, e]     layers s .. e-1 in one of its ways, with a time and a gain
    D[t, e] = max over segments (s, e] of  D[t - time, s] + gain         D[t, 0] = 0
    answer  D[budget, n], traced back; of equal gains the shorter time

In the paper a segment is a run of convolutions between two activations that stay: the activations inside go, some of
the convolutions too, and the others are one convolution afterwards (`merge_convs`). Its gain is exp of the accuracy
after a short training with only this segment replaced, its time is measured, in units of 0.01 ms.

For transformers, the analogue here; it is not in the paper:
    keep     a layer as it is
    drop     a layer is not visited
    fuse     a run of layers becomes its first mixer and one feed-forward of the summed width (`fuse`)
Gains are differences of `gain` to the original with only this segment replaced, and are added up as if independent;
times are those that the segment saves in `cost`.

Cost: one call of `gain` and `cost` for each segment, and steps x segments additions.

Kim et al., LayerMerge: Neural Network Depth Compression through Layer Pruning and Merging, ICML 2024, arXiv:2406.12837.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.registry import method
from deepen.surgery.drop import drop
from deepen.surgery.fuse import fuse
from deepen.surgery.place import stretch, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# Gains are compared to seven decimals, as in the paper.
DECIMALS = 7


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One way to treat a run of places.

    Attributes:
        start: the first place.
        end: one past the last.
        way: what is done with them.
        time: what it costs, in whole units, 0 or more.
        gain: what it is worth; higher is better.
    """

    start: int
    end: int
    way: str
    time: int
    gain: float


def best_segments(segments: Sequence[Segment], length: int, budget: int) -> tuple[Segment, ...]:
    """The segments that cover the places 0 to `length` once, in order, of the highest sum of gains within a budget.

    Args:
        segments: to choose from.
        length: number of places.
        budget: the most that the times may add up to.

    Raises:
        UsageError: a segment outside of the places or with a negative time, or no choice fits; says the least time.
    """
    for each in segments:
        if not (0 <= each.start < each.end <= length and each.time >= 0):
            raise UsageError(
                f"segment {each.start} to {each.end} of time {each.time}: expected places within 0 to {length} and a "
                "time of 0 or more"
            )
    ending = [[each for each in segments if each.end == end] for end in range(length + 1)]
    least = [0.0] + [math.inf] * length
    for end in range(1, length + 1):
        least[end] = min((least[each.start] + each.time for each in ending[end]), default=math.inf)
    if least[length] > budget:
        needs = "no choice covers every place" if math.isinf(least[length]) else f"the least time is {least[length]:g}"
        raise UsageError(f"no segments fit a budget of {budget}: {needs}")
    # For each place, time -> (gain, the segment that ends there): only times that some choice has.
    best: list[dict[int, tuple[float, Segment | None]]] = [{0: (0.0, None)}]
    for end in range(1, length + 1):
        found: dict[int, tuple[float, Segment | None]] = {}
        for each in ending[end]:
            for time, (gain, _) in best[each.start].items():
                total, sum_ = time + each.time, round(gain + each.gain, DECIMALS)
                if total <= budget and (total not in found or sum_ > found[total][0]):
                    found[total] = (sum_, each)
        best.append(found)
    time = min(best[length], key=lambda total: (-best[length][total][0], total))
    chosen: list[Segment] = []
    end = length
    while end:
        segment = best[end][time][1]
        assert segment is not None
        chosen.append(segment)
        end, time = segment.start, time - segment.time
    return tuple(reversed(chosen))


@method(
    "layer-merge",
    family="surgery",
    source="arXiv:2406.12837",
    title="LayerMerge: Neural Network Depth Compression through Layer Pruning and Merging",
    mechanism="a dynamic programme chooses which layers are kept, dropped or fused with their neighbours",
    cost="one evaluation for each layer and each run that may be fused",
)
def layer_merge(
    ck: Checkpoint,
    gain: Callable[[Checkpoint], float],
    *,
    budget: float = 0.75,
    longest: int = 3,
    cost: Callable[[Checkpoint], float] = lambda ck: ck.cost().flops,
    steps: int = 10_000,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Drops and fuses layers until a share of the cost is left, for the highest sum of gains.

        worth = lambda each: -deepen.perplexity(each.load(), ck.tokenizer(), text).nll
        small, report = deepen.layer_merge(ck, worth, budget=0.8)

    Args:
        ck: what to change; its program visits each layer once and in full.
        gain: what a checkpoint is worth; higher is better. Called for the original and once a segment.
        budget: the share of the cost of the layers that may stay.
        longest: the most layers that are fused into one.
        cost: what a checkpoint costs: FLOPs a token unless given, or a measured time.
        steps: into how many units the cost of all layers is divided; each time is rounded down, so that the budget may
            be exceeded by one unit a segment.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: the program is not a plain list of layers.
        UsageError: a budget, length or number of steps out of range, a layer visited in part, or gains or costs that
            are not finite.
    """
    if not 0 < budget <= 1:
        raise UsageError(f"layer_merge: the budget is a share above 0 and at most 1, got {budget}")
    if longest < 1 or steps < 1:
        raise UsageError(f"layer_merge: expected at least 1 layer and 1 step, got {longest} and {steps}")
    found, _ = tower_key(ck, tower)
    visits = ck.plan(found.name).visits
    layers = [visit.key.layer for visit in visits]
    if partial := next((visit for visit in visits if visit.parts != found.parts.letters), None):
        raise UsageError(f"layer_merge: layer {partial.key} is visited in part ({partial.parts})")
    # A program of a loop, a group or a layer twice has no stretch from its first layer to its last.
    _, refs, _ = stretch(ck, tower, layers[0], layers[-1], "layer_merge")
    if [ref.first.value for ref in refs] != layers:
        raise ProgramError(f"layer_merge: `{ck.program}` is not a plain list of layers, each once")
    segments, unit, total = _table(ck, tower, layers, gain, cost, longest, steps)
    chosen = best_segments(segments, len(layers), math.floor(budget * total / unit))
    made = ck
    for each in chosen:
        run = layers[each.start : each.end]
        if each.way == "drop":
            made = drop(made, run, tower=tower)[0]
        elif each.way == "fuse":
            made = fuse(made, run[0], run[-1], mixer=True, tower=tower)[0]
    told = [f"{each.way} {'-'.join(str(layers[at]) for at in (each.start, each.end - 1))}" if each.way == "fuse"
            else f"{each.way} {layers[each.start]}" for each in chosen if each.way != "keep"]  # fmt: skip
    merged = {ck.depth[found.name] + at: tuple(layers[each.start : each.end])
              for at, each in enumerate(each for each in chosen if each.way == "fuse")}  # fmt: skip
    return made, report(
        ck, made, found.name, "layer-merge", ", ".join(told) or "kept every layer",
        merged=merged,
        figures={"cost": 1 - (cost(ck) - cost(made)) / total, "gain": sum(each.gain for each in chosen)},
    )  # fmt: skip


def _table(
    ck: Checkpoint,
    tower: str,
    layers: Sequence[int],
    gain: Callable[[Checkpoint], float],
    cost: Callable[[Checkpoint], float],
    longest: int,
    steps: int,
) -> tuple[list[Segment], float, float]:
    """Every segment with its time and gain, the size of a unit of time, and the time of all layers together."""
    whole, worth = _finite(cost(ck), "cost"), _finite(gain(ck), "gain")
    without = [drop(ck, [layer], tower=tower)[0] for layer in layers]
    own = [whole - _finite(cost(each), "cost") for each in without]
    if min(own) <= 0:
        raise UsageError(
            f"layer_merge: dropping layer {layers[own.index(min(own))]} does not lower the cost; measure it better"
        )
    total = sum(own)
    unit = total / steps
    segments = []
    for at, each in enumerate(without):
        # Rounded down, so that keeping everything fits a budget of 1.
        segments.append(Segment(start=at, end=at + 1, way="keep", time=math.floor(own[at] / unit), gain=0.0))
        lost = _finite(gain(each), "gain") - worth
        segments.append(Segment(start=at, end=at + 1, way="drop", time=0, gain=lost))
    for start in range(len(layers)):
        for end in range(start + 2, min(len(layers), start + longest) + 1):
            try:
                each, _ = fuse(ck, layers[start], layers[end - 1], mixer=True, tower=tower)
            except (FamilyError, UsageError):
                # Layers of different kinds or in falling order are no run that could be fused.
                continue
            spent = sum(own[start:end]) - (whole - _finite(cost(each), "cost"))
            time = max(0, math.floor(spent / unit))
            lost = _finite(gain(each), "gain") - worth
            segments.append(Segment(start=start, end=end, way="fuse", time=time, gain=lost))
    return segments, unit, total


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise UsageError(f"layer_merge: the {what} of a checkpoint is {value}; expected a finite number")
    return float(value)
