"""Block influence: how far a visit turns the stream, over all tokens.

    BI_l = 1 - mean cos(h_l, h_{l+1})        0 for a layer that changes nothing, at most 2

Visits of low influence are the ones that the published rule drops. It is blind to what a layer does to the norm.

Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect, arXiv:2403.03853.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import Result, WatchScore, column
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.collect import Seen


@method(
    "block_influence",
    family="score",
    source="arXiv:2403.03853",
    title="ShortGPT: Layers in Large Language Models are More Redundant Than You Expect",
    mechanism="1 - mean cosine of the stream before and after a visit",
    cost="shares one pass without the head",
)
class BlockInfluence(WatchScore):
    """Sums of the cosine over all tokens, and over all but the first of each window."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.whole, self.later = np.zeros(depth), np.zeros(depth)
        self.tokens = np.zeros(depth, dtype=np.int64)
        self.windows = 0

    def watch(self, seen: Seen) -> None:
        cosine = cosines(seen.product, seen.before.squares, seen.after.squares)
        self.whole[seen.visit] += cosine.sum().item()
        self.later[seen.visit] += cosine[:, 1:].sum().item()
        self.tokens[seen.visit] += cosine.numel()
        self.windows += len(cosine) * seen.last

    def result(self) -> Result:
        whole = 1 - self.whole / self.tokens
        later = 1 - self.later / (self.tokens - self.windows)
        meaning = "1 - mean cosine of the stream before and after"
        count = int(self.tokens[0])
        return Result(
            (
                column("block_influence", whole, "high", meaning, count),
                column("block_influence.later", later, "neither", f"{meaning}, first tokens left out", count),
            )
        )


def cosines(product: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cosines from inner products and squared norms, all [b, t] in fp64; 0 where a vector is zero."""
    return (product / (one * other).sqrt().clamp_min(1e-300)).clamp(-1, 1)
