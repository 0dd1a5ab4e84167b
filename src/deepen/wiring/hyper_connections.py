"""Hyper-Connections: n streams; each site reads a mix of them, mixes them among themselves, and writes to each.

    u   = A_m^T H                  H: (n, D) a token, at first n copies of the embedding
    H'  = A_r^T H + B^T F(norm(u))
    out = sum of the streams         marks, gates and hooks see their mean (R)

    H_1 ─┬────────┬── A_r ── + (B_1 y) ── H'_1
    ...  │  A_m   │   ...      ...        ...
    H_n ─┴── u    └── A_r ── + (B_n y) ── H'_n        y = F(norm(u))

A dynamic site (the default) adds to each matrix a small function of the streams: s tanh(norm(H) W), W = 0 at first. Row
i of it depends on stream i alone. Parameters belong to sites.

Source: Zhu et al., Hyper-Connections, arXiv:2409.19606.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape
from deepen.wiring.entries import SITE, Entries, numbered, rows
from deepen.wiring.streams import Streams


@method(
    "hyper-connections",
    family="wiring",
    source="arXiv:2409.19606",
    title="Hyper-Connections",
    mechanism="n streams with learned read, mix and write weights at each site",
    cost="about n (n + 2) multiply-adds a channel and site, twice that when dynamic; n streams are kept",
)
class HyperConnections(Streams):
    """n streams in the place of one; the state is (B, T, n, D).

    Args:
        shape: what it is built for.
        streams: n.
        dynamic: whether the weights depend on the token.
    """

    equals = "Pre-LN: all streams stay equal, and the final norm takes their number away"
    dead: ClassVar[Mapping[str, str]] = {
        "read_weights.0": "before the first site all streams are equal, and the norm takes the size of their sum away",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the update, its transpose and its initial values",
        "N": "the equality with Pre-LN",
        "R": "initial output matrices keep their scale: in which direction the paper moves it by sqrt(n) is not said",
    }

    def __init__(self, shape: Shape, *, streams: Annotated[int, Field(ge=1)] = 4, dynamic: bool = True) -> None:
        super().__init__(shape, streams)
        self.dynamic = dynamic
        sites = len(shape.sites)
        self.read_weights = nn.Parameter(torch.empty(sites, streams))
        self.mix_weights = nn.Parameter(torch.empty(sites, streams, streams))
        self.write_weights = nn.Parameter(torch.empty(sites, streams))
        if dynamic:
            # The columns: how to read, how to mix (n of them), how to write.
            self.maps = nn.Parameter(torch.empty(sites, shape.width, streams + 2))
            self.scales = nn.Parameter(torch.empty(sites, 2))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        names = ("read_weights", "mix_weights", "write_weights", *(("maps", "scales") if self.dynamic else ()))
        return rows(numbered(SITE, len(self.shape.sites)), *names)

    def reset(self) -> None:
        sites, streams = self.read_weights.shape
        nn.init.zeros_(self.read_weights)
        with torch.no_grad():
            self.read_weights[torch.arange(sites), torch.arange(sites) % streams] = 1
            self.mix_weights.copy_(torch.eye(streams).expand_as(self.mix_weights))
        nn.init.ones_(self.write_weights)
        if self.dynamic:
            nn.init.zeros_(self.maps)
            nn.init.constant_(self.scales, 0.01)

    def read(self, state: torch.Tensor, site: Site) -> Read:
        reads, mixes, writes = self._weights(state, site.index)
        u = (reads.unsqueeze(-2) @ state).squeeze(-2) if reads.ndim > 1 else reads @ state
        return Read(u, carry=(mixes, writes))

    def _weights(self, state: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A_m: (..., n), A_r: (..., n, n) and B: (..., n) of a site."""
        fixed = self.read_weights[index], self.mix_weights[index], self.write_weights[index]
        if not self.dynamic:
            return fixed
        normed = F.rms_norm(state, (state.shape[-1],), eps=self.shape.eps)
        moved = torch.tanh(normed @ self.maps[index])
        to_matrices, to_writes = self.scales[index]
        read, mix, write = moved.split((1, self.streams, 1), dim=-1)
        return (
            fixed[0] + to_matrices * read.squeeze(-1),
            fixed[1] + to_matrices * mix,
            fixed[2] + to_writes * write.squeeze(-1),
        )

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        mixes, writes = read.carry
        return mixes.mT @ state + writes.unsqueeze(-1) * y.unsqueeze(-2)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return state.sum(-2)
