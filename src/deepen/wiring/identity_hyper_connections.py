"""Identity Hyper-Connections (iHC): n streams that are never mixed, only read and written.

    X_j' = X_j + post_j F(norm(sum_i pre_i X_i))          X: (n, D) a token

    X_1 ─┬──────────── + (post_1 y) ── X'_1
    ...  │  pre        ...              ...
    X_n ─┴── u ─────── + (post_n y) ── X'_n         y = F(norm(u))

This is mHC with the identity in the place of its mixing matrices. `pre` and `post` are in `gated_streams.py`. Initial
values and the readout, the mean or the sum of the streams, are those of mHC here (R); a released model adds 1e-6 to
both gates and reads the streams out with gates of their own, which is not built.

Source: ablation of Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape
from deepen.wiring.gated_streams import GatedStreams


@method(
    "identity-hyper-connections",
    family="wiring",
    source="arXiv:2512.24880",
    title="mHC: Manifold-Constrained Hyper-Connections",
    mechanism="n streams; bounded read and write weights, no mixing",
    cost="2 n (n + 1) multiply-adds a channel and site; n streams are kept",
)
class IdentityHyperConnections(GatedStreams):
    """Streams that are not mixed.

    Args:
        shape: what it is built for.
        streams: n.
        readout: what of the streams the final norm sees.
    """

    equals = "Pre-LN: all streams stay equal"
    dead: ClassVar[Mapping[str, str]] = {
        "read_bias.0": "before the first site all streams are equal, and the norm takes the size of their sum away",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equation and the gates",
        "N": "the equality with Pre-LN, and mHC with the identity for mixing",
        "R": "initial biases, the readout",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        streams: Annotated[int, Field(ge=1)] = 4,
        readout: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(shape, streams, 0, scaled=False, readout=readout)
        # nothing is learned for matrices of no logits
        del self.mix_bias
        self.register_buffer("mix_bias", torch.empty(len(shape.sites), 0), persistent=False)

    def matrix(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.eye(self.streams, dtype=logits.dtype, device=logits.device)

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        _, writes = read.carry
        return state + writes.unsqueeze(-1) * y.unsqueeze(-2)
