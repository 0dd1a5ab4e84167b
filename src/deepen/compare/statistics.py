"""What the same seeds under two designs say of their difference.

    d_s = metric of one under seed s - metric of the other under seed s

Seeds share the order of the data, so they are compared in pairs. Of the mean difference there are two intervals of
95 %: Student's, mean +- t(n-1) s / sqrt(n), which takes the differences as normal, and the percentile bootstrap, which
takes the seeds at hand as the whole world and is too narrow for a few of them. A verdict needs Student's. The sign test
asks how likely so uneven a split of signs is when neither is better; n seeds can show no less than 2 / 2^n.

Source: Student's t and the sign test are textbook; bootstrap: Efron and Tibshirani, 1993.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

DRAWS = 10_000
# Every resample of so few seeds is gone through.
FEW = 6
# The 0.975 quantiles of Student's t by degrees of freedom, from 1; beyond them the normal one is used.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL = 1.960


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A paired comparison over seeds; bounds are NaN for one seed, of which nothing can be said.

    Attributes:
        mean: of the differences.
        low: lower end of Student's interval.
        high: its upper end.
        bootstrap_low: lower end of the percentile bootstrap.
        bootstrap_high: its upper end.
        below: seeds with a difference below 0.
        above: seeds with one above 0.
        sign_p: of the two-sided sign test; ties are left out.
        seeds: how many.
    """

    mean: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    below: int
    above: int
    sign_p: float
    seeds: int

    @property
    def shown(self) -> str:
        """`lower` or `higher` where Student's interval leaves out 0, else `not told apart`."""
        if self.high < 0:
            return "lower"
        return "higher" if self.low > 0 else "not told apart"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; unknown bounds are None."""
        fields = {name: None if value != value else value for name, value in asdict(self).items()}
        return {**fields, "shown": self.shown}


def paired(one: Sequence[float], other: Sequence[float]) -> Paired:
    """Compares two designs seed by seed, the first less the other.

    Raises:
        ValueError: not the same number of seeds, or none.
    """
    if len(one) != len(other) or not one:
        raise ValueError(f"a paired comparison needs the same seeds on both sides, got {len(one)} and {len(other)}")
    moved = [a - b for a, b in zip(one, other, strict=True)]
    n, mean = len(moved), statistics.fmean(moved)
    low = high = math.nan
    if n > 1:
        reach = (STUDENT[n - 2] if n - 2 < len(STUDENT) else NORMAL) * statistics.stdev(moved) / math.sqrt(n)
        low, high = mean - reach, mean + reach
    below, above = sum(value < 0 for value in moved), sum(value > 0 for value in moved)
    drawn_low, drawn_high = bootstrap(moved)
    return Paired(
        mean=mean, low=low, high=high, bootstrap_low=drawn_low, bootstrap_high=drawn_high, below=below, above=above,
        sign_p=sign_test(below, above), seeds=n,
    )  # fmt: skip


def bootstrap(values: Sequence[float], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of resamples: of all n^n for a few values, else of drawn ones."""
    import numpy as np

    n = len(values)
    if n < 2:
        return math.nan, math.nan
    if n <= FEW:
        picks = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        picks = np.random.default_rng(seed).integers(n, size=(draws, n))
    low, high = np.quantile(np.asarray(values, dtype=np.float64)[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def sign_test(below: int, above: int) -> float:
    """How likely a split at least so uneven is when both signs are as likely: two-sided, exact."""
    n, fewer = below + above, min(below, above)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
