"""Layer-update geometry: how much of what a visit does is one map of each token by itself, without its neighbours.

    g(h) = a * h + b, fitted to h_{l+1} by least squares over tokens          a, b: one number a dimension
    R2 = 1 - |h_{l+1} - g(h)|^2 / |h_{l+1} - mean|^2          residual = |u - (g(h) - h)|^2 / |u|^2,  u = h_{l+1} - h_l

Of the families of maps in the source this is the diagonal one, the only one whose fit streams in O(d) a visit. It is
fitted on every second window and judged on the others, so that fit and test tokens come from different sequences. A
layer that copies or rescales each dimension has R2 = 1.

Yoo, On the Geometric Structure of Layer Updates in Deep Language Models, arXiv:2604.02459.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import Result, WatchScore, column
from deepen.probe.scores.reading import exact
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.collect import Seen


@method(
    "geometry",
    family="score",
    source="arXiv:2604.02459",
    title="On the Geometric Structure of Layer Updates in Deep Language Models",
    mechanism="share of a visit that one diagonal map of each token explains on held-out windows",
    cost="shares one pass without the head; needs two windows",
)
class Geometry(WatchScore):
    """Moments of every dimension, of the windows that fit and of those that judge."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        # [visit, fit or test]: n, then sums over tokens of h, u, h h, h u, u u, each [d]
        self.moments: list[list[Moments]] = [[Moments(), Moments()] for _ in range(depth)]
        self.windows = 0

    def watch(self, seen: Seen) -> None:
        before, update = seen.before.values, seen.update
        for half, moments in enumerate(self.moments[seen.visit]):
            chosen = slice((half - self.windows) % 2, None, 2)
            if len(rows := before[chosen]):
                moments.add(rows.flatten(0, 1), update[chosen].flatten(0, 1))
        self.windows += len(before) * seen.last

    def result(self) -> Result:
        if self.windows < 2:
            return Result(note="skipped: it needs two windows, one to fit and one to judge; raise --tokens")
        found = np.array([explained(*halves) for halves in self.moments])
        count = self.moments[0][1].count
        meaning = "share of the variance of the stream after the visit that a diagonal map explains, held out"
        return Result(
            (
                column("geometry", found[:, 0], "low", meaning, count),
                column("geometry.residual", found[:, 1], "neither", "share of the update it leaves, held out", count),
            )
        )


class Moments:
    """Sums over tokens for each dimension, fp64."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: np.ndarray = np.zeros(())

    def add(self, stream: torch.Tensor, update: torch.Tensor) -> None:
        """Adds tokens: [t, d] and [t, d]."""
        import torch

        stream, update = exact(stream), exact(update)
        terms = (stream, update, stream * stream, stream * update, update * update)
        self.sums = self.sums + torch.stack([term.sum(0, dtype=torch.float64) for term in terms]).cpu().numpy()
        self.count += len(stream)


def explained(fit: Moments, test: Moments) -> tuple[float, float]:
    """R2 of the stream after the visit, and the share of the update that is left, on `test`; NaN for no update.

    The map is fitted to the update, u = c h + b with c = a - 1, which leaves the same residual and rounds less.
    """
    h, u, hh, hu, _ = fit.sums / fit.count
    spread = hh - h * h
    slope = np.divide(hu - h * u, spread, out=np.zeros_like(h), where=spread > 1e-12 * np.maximum(hh, 1e-300))
    shift = u - slope * h
    h, u, hh, hu, uu = test.sums / test.count
    left = uu + slope**2 * hh + shift**2 - 2 * slope * hu - 2 * shift * u + 2 * slope * shift * h
    variance = (hh + 2 * hu + uu) - (h + u) ** 2
    left_over, update = max(left.sum(), 0.0), uu.sum()
    return 1 - left_over / variance.sum(), left_over / update if update > 0 else np.nan
