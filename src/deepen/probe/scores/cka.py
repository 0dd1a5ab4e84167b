"""Unbiased linear CKA between the streams at all depths: how alike two layers arrange the same tokens.

    HSIC1(K, L) = [ tr(K L) + 1'K1 1'L1 / ((n-1)(n-2)) - 2/(n-2) 1'K L 1 ] / (n (n-3))     K, L: Gram, diagonal zero
    CKA = sum HSIC1(K, L) / sqrt( sum HSIC1(K, K) sum HSIC1(L, L) )                       sums over windows

n sampled tokens a window. Unlike the biased form its value for independent streams is about 0, whatever the width, and
it may be negative. A visit whose streams before and after have CKA 1 has only rotated, scaled or shifted them.

Kornblith et al., Similarity of Neural Network Representations Revisited, arXiv:1905.00414; unbiased over minibatches:
Nguyen, Raghu, Kornblith, arXiv:2010.15327.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.errors import UsageError
from deepen.probe.scores.base import Matrix, Result, WatchScore, column
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.collect import Seen

# Fewer vectors than this have no unbiased estimate.
FEWEST = 4


@method(
    "cka",
    family="score",
    source="arXiv:2010.15327",
    title="Do Wide and Deep Networks Learn the Same Things?",
    mechanism="unbiased linear CKA between streams, from Gram matrices of the sampled tokens of each window",
    cost="shares one pass without the head; 64 tokens of a window",
)
class Cka(WatchScore):
    """Sums over windows of HSIC1 between the streams before and after every visit."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.grams: list[torch.Tensor] = []
        self.sums = np.zeros((2 * depth, 2 * depth))
        self.windows = 0

    def watch(self, seen: Seen) -> None:
        before, after = seen.before.gram, seen.after.gram
        if before is None or after is None:
            return
        if len(before[0]) < FEWEST:
            raise UsageError(f"cka needs windows of at least {FEWEST + 1} tokens; raise --context")
        self.grams += [before, after]
        if seen.last:
            import torch

            self.sums += hsic(torch.stack(self.grams, 1)).sum(0).cpu().numpy()
            self.windows += len(before)
            self.grams.clear()

    def result(self) -> Result:
        sizes = np.sqrt(np.diag(self.sums).clip(min=0))
        with np.errstate(invalid="ignore", divide="ignore"):
            similar = self.sums / np.outer(sizes, sizes)
        own = similar[np.arange(self.depth) * 2, np.arange(self.depth) * 2 + 1]
        # the streams in their order: before the first visit, then after each
        places = [0, *range(1, 2 * self.depth, 2)]
        return Result(
            (column("cka", own, "low", "CKA of the streams before and after the visit", self.windows),),
            (
                Matrix(
                    name="cka",
                    values=similar[np.ix_(places, places)],
                    rows="visits run",
                    columns="visits run",
                    meaning="unbiased linear CKA of the streams after so many visits",
                ),
            ),
        )


def hsic(grams: torch.Tensor) -> torch.Tensor:
    """HSIC1 between all pairs of Gram matrices.

    Args:
        grams: [..., s, n, n], symmetric, fp64; their diagonals are ignored.

    Returns:
        [..., s, s].
    """
    import torch

    n = grams.shape[-1]
    eye = torch.eye(n, dtype=torch.bool, device=grams.device)
    grams = grams.masked_fill(eye, 0.0)
    flat, rows = grams.flatten(-2), grams.sum(-1)
    total = rows.sum(-1)
    product = flat @ flat.mT + total[..., :, None] * total[..., None, :] / ((n - 1) * (n - 2))
    return (product - 2 / (n - 2) * rows @ rows.mT) / (n * (n - 3))
