"""How much better one program predicts a text than another, with an interval over its windows.

    d = sum(nll_one) / tokens - sum(nll_two) / tokens        nats a token; below 0: the first is better

Both programs read the same windows, so windows are drawn in pairs, with replacement; the interval holds the middle
95 % of the differences (percentile bootstrap). One window says nothing of others: the bounds are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from deepen.probe.perplexity import Evaluation

DRAWS, SHARE = 2000, 0.95


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of losses in nats a token, its interval, and the number of windows."""

    value: float
    low: float
    high: float
    windows: int

    @property
    def ratio(self) -> float:
        """The ratio of the perplexities."""
        return math.exp(min(self.value, 700.0))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return {"value": self.value, "low": self.low, "high": self.high, "ratio": self.ratio, "windows": self.windows}


def paired_difference(one: Evaluation, two: Evaluation, *, draws: int = DRAWS, seed: int = 0) -> Difference:
    """The difference of two evaluations of one text, the first less the second.

    Raises:
        ValueError: they are not of the same windows.
    """
    import numpy as np

    if one.window_tokens != two.window_tokens or not one.window_tokens:
        raise ValueError("a paired difference needs two evaluations of the same windows")
    tokens = np.array(one.window_tokens, dtype=np.float64)
    moved = np.array(one.window_nll) - np.array(two.window_nll)
    value = float(moved.sum() / tokens.sum())
    if len(tokens) == 1:
        return Difference(value=value, low=math.nan, high=math.nan, windows=1)
    picks = np.random.default_rng(seed).integers(len(tokens), size=(draws, len(tokens)))
    drawn = moved[picks].sum(1) / tokens[picks].sum(1)
    low, high = np.quantile(drawn, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Difference(value=value, low=float(low), high=float(high), windows=len(tokens))
