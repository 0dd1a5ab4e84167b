"""Manifold-constrained Hyper-Connections (mHC): n streams mixed by doubly stochastic matrices.

    X' = mix X + post^T F(norm(pre X))       X: (n, D) a token
    mix = Sinkhorn(logits): M = exp(logits), then `iters` times columns and then rows are divided by their sums

    X_1 ─┬────────┬── mix ── + (post_1 y) ── X'_1
    ...  │  pre   │   ...      ...            ...
    X_n ─┴── u    └── mix ── + (post_n y) ── X'_n         y = F(norm(u))

A product of such matrices is one again, so that no depth makes the streams explode. The mean over streams is kept as
far as the columns converged, which near the identity is slow. `pre` and `post` are in `gated_streams.py`. Logits begin
at 0 on the diagonal and -8 off it (R): zeros would make every site average the streams. The paper does not say how the
streams are read out; here as their mean or sum (R).

Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from deepen.registry import method
from deepen.wiring.base import Shape
from deepen.wiring.gated_streams import GatedStreams

# Logits off the diagonal at first.
APART = -8.0


def sinkhorn(logits: torch.Tensor, iters: int) -> torch.Tensor:
    """Matrices (..., n, n) whose rows sum to 1, and whose columns do as far as it converged; from logits."""
    matrix = torch.exp(logits - logits.amax((-2, -1), keepdim=True))
    for _ in range(iters):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


@method(
    "manifold-hyper-connections",
    family="wiring",
    source="arXiv:2512.24880",
    title="mHC: Manifold-Constrained Hyper-Connections",
    mechanism="n streams; doubly stochastic mixing, bounded read and write weights",
    cost="n (n + 1) (n + 2) multiply-adds a channel and site, `iters` normalisations; n streams are kept",
)
class ManifoldHyperConnections(GatedStreams):
    """Streams mixed by doubly stochastic matrices.

    Args:
        shape: what it is built for.
        streams: n.
        iters: rounds of Sinkhorn's normalisation.
        readout: what of the streams the final norm sees.
    """

    equals = "Pre-LN: all streams stay equal"
    dead: ClassVar[Mapping[str, str]] = {
        "read_bias.0": "before the first site all streams are equal, and the norm takes the size of their sum away",
        "mix_bias.0": "before the first site all streams are equal, and rows that sum to 1 leave them so",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, the order of rows and columns, the first value of the scales",
        "N": "the equality with Pre-LN, row and column sums, spectral norms of at most 1",
        "R": "initial maps and biases, the readout",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        streams: Annotated[int, Field(ge=1)] = 4,
        iters: Annotated[int, Field(ge=1)] = 20,
        readout: Literal["mean", "sum"] = "mean",
    ) -> None:
        self.iters = iters
        super().__init__(shape, streams, streams**2, scaled=True, readout=readout)

    def reset(self) -> None:
        super().reset()
        n = self.streams
        with torch.no_grad():
            self.mix_bias.copy_((APART * (1 - torch.eye(n))).flatten().expand_as(self.mix_bias))

    def matrix(self, logits: torch.Tensor) -> torch.Tensor:
        return sinkhorn(logits.unflatten(-1, (self.streams, self.streams)), self.iters)
