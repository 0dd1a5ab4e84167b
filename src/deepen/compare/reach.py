"""How much of the baseline's training a variant needs to get as far.

    r_s = F(first crossing of v_s by the variant's curve) / F_s

`v_s` is what the baseline of seed s measured at its last look and `F_s` the FLOPs (or seconds) it had spent by then;
the crossing is interpolated linearly between two looks of the variant. Ratios are averaged by their logarithms, with
Student's interval over seeds. A seed that never gets there has no ratio, and then there is no mean: leaving it out
would favour the variant.

Source: the speed-up at equal loss of growth papers, e.g. Du et al., arXiv:2405.15319.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepen.compare.statistics import paired

AXES = ("flops", "seconds")


def spent_at(
    curve: Sequence[Mapping[str, Any]], measure: str, value: float, axis: str, *, higher_is_better: bool
) -> float | None:
    """What had been spent when a curve first was as good as `value`; None where it never was.

    Args:
        curve: looks in their order, with the axis and the measure.
        measure: what is looked at.
        value: to be reached.
        axis: `flops` or `seconds`.
        higher_is_better: of the measure.
    """
    sign = 1.0 if higher_is_better else -1.0
    before = None
    for point in curve:
        if measure not in point:
            continue
        ahead = sign * (point[measure] - value)
        if ahead >= 0:
            if before is None:
                return float(point[axis])
            behind = sign * (before[measure] - value)
            share = behind / (behind - ahead)
            return float(before[axis] + share * (point[axis] - before[axis]))
        before = point
    return None


def reach(
    one: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], measure: str, *, higher_is_better: bool
) -> dict[str, Any]:
    """The share of the baseline's FLOPs and seconds at which a variant was as good as the baseline at its end.

    Args:
        one: runs of the variant, with their curves.
        base: those of the baseline, of the same seeds in the same order.
        measure: what is looked at.
        higher_is_better: of the measure.

    Returns:
        `seeds` and `reached`, how many of them got there; of `flops` and of `seconds` the geometric mean `mean` with
        its interval `low` to `high`, None where a seed did not get there or nobody looked (and for the bounds, where
        there is one seed).
    """
    found: dict[str, Any] = {"seeds": len(one), "reached": 0}
    for axis in AXES:
        shares = []
        for run, other in zip(one, base, strict=True):
            looks = [point for point in other["curve"] if measure in point]
            if not looks or not math.isfinite(looks[-1][measure]) or looks[-1][axis] <= 0:
                continue
            last = looks[-1]
            spent = spent_at(run["curve"], measure, last[measure], axis, higher_is_better=higher_is_better)
            if spent is not None and spent > 0:
                shares.append(math.log(spent / last[axis]))
        found["reached"] = len(shares)
        found[axis] = _mean(shares) if len(shares) == len(one) else {"mean": None, "low": None, "high": None}
    return found


def _mean(logs: Sequence[float]) -> dict[str, float | None]:
    over = paired(logs, [0.0] * len(logs))
    bounds = {
        name: None if math.isnan(each) else math.exp(each) for name, each in (("low", over.low), ("high", over.high))
    }
    return {"mean": math.exp(over.mean), **bounds}
