"""Effective rank and matrix entropy of the stream after each visit: over how many directions the tokens spread.

    lambda: eigenvalues of Z Z^T / n, rows of Z the n sampled tokens of a window, each scaled to length 1
    entropy = - sum lambda log lambda / log min(n, d)        0: all tokens alike, 1: all orthogonal
    effective rank = exp(- sum p log p),  p = sqrt(lambda) / sum sqrt(lambda)

Means over windows. Roy and Vetterli, The effective rank, EUSIPCO 2007; Skean et al., Layer by Layer: Uncovering Hidden
Representations in Language Models, arXiv:2502.02013.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from deepen.probe.scores.base import Result, WatchScore, column
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.collect import Seen


@method(
    "effective_rank",
    family="score",
    source="arXiv:2502.02013",
    title="Layer by Layer: Uncovering Hidden Representations in Language Models",
    mechanism="entropy of the spectrum of sampled tokens after a visit, of squared and of plain singular values",
    cost="shares one pass without the head; 64 tokens of a window",
)
class EffectiveRank(WatchScore):
    """Sums over windows of the entropies; the eigenvalues of all visits are taken together."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.grams: list[torch.Tensor] = []
        self.sums = np.zeros((depth, 2))
        self.windows, self.highest = 0, 0.0

    def watch(self, seen: Seen) -> None:
        gram = seen.after.gram
        if gram is None:
            return
        self.grams.append(gram)
        if seen.last:
            import torch

            self.highest = math.log(min(gram.shape[-1], seen.after.values.shape[-1]))
            entropy, rank = spectrum(torch.stack(self.grams))
            self.sums += torch.stack((entropy.sum(-1), rank.sum(-1)), -1).cpu().numpy()
            self.windows += len(gram)
            self.grams.clear()

    def result(self) -> Result:
        entropy, rank = (self.sums / self.windows).T
        share = entropy / self.highest if self.highest else entropy
        meaning = "matrix entropy of sampled tokens after the visit, a share of the highest possible"
        return Result(
            (
                column("effective_rank", rank, "neither", "directions the sampled tokens spread over", self.windows),
                column("effective_rank.entropy", share, "neither", meaning, self.windows),
            )
        )


def spectrum(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrix entropy in nats, and effective rank.

    Args:
        gram: products of n vectors, [..., n, n], fp64; the vectors are scaled to length 1 here.

    Returns:
        [...] and [...].
    """
    import torch

    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-150)
    scaled = gram / (lengths[..., :, None] * lengths[..., None, :] * gram.shape[-1])
    # rounding leaves eigenvalues of the order of 1e-17 where there are none
    values = torch.linalg.eigvalsh(scaled)
    values = torch.where(values < 1e-14, 0.0, values)
    singular = values.sqrt()
    singular = singular / singular.sum(-1, keepdim=True).clamp_min(1e-150)
    return torch.special.entr(values).sum(-1), torch.special.entr(singular).sum(-1).exp()
