"""n streams whose read, write and mixing weights are bounded functions of the token: the base of mHC and oHC.

    g    = RMSNorm(vec(X)) W                        X: (n, D) a token; W: (n D, 2 n + k) a site
    pre  = sigmoid(a1 g[:n] + b1)                   in (0, 1)
    post = 2 sigmoid(a2 g[n:2n] + b2)               in (0, 2)
    mix  = matrix(a3 g[2n:] + b3)                   (n, n)
    X'   = mix X + post^T F(norm(pre X))            no transpose on mix

At first W = 0, pre = 1 / n and post = 1: all streams stay equal, whatever `mix` is, as long as its rows sum to 1 or it
is the identity. All of it in single precision at least. Parameters belong to sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, wide
from deepen.wiring.entries import SITE, Entries, listed, numbered, rows
from deepen.wiring.streams import Streams

# a at first.
SCALE = 0.01


class GatedStreams(Streams):
    """The base; a method says how logits become a matrix.

    Args:
        shape: what it is built for.
        streams: n.
        logits: k, of the matrix.
        scaled: whether a3 is learned; else it keeps its first value.
        readout: what of the streams the final norm sees.
    """

    def __init__(
        self, shape: Shape, streams: int, logits: int, *, scaled: bool, readout: Literal["mean", "sum"]
    ) -> None:
        super().__init__(shape, streams)
        sites, wide_ = len(shape.sites), streams * shape.width
        self.summary, self.sizes = readout, (streams, streams, logits)
        self.maps = nn.ParameterList(nn.Parameter(torch.empty(wide_, 2 * streams + logits)) for _ in range(sites))
        self.scales = nn.Parameter(torch.empty(sites, 3 if scaled else 2))
        self.read_bias = nn.Parameter(torch.empty(sites, streams))
        self.write_bias = nn.Parameter(torch.empty(sites, streams))
        self.mix_bias = nn.Parameter(torch.empty(sites, logits))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        sites = numbered(SITE, len(self.shape.sites))
        names = [name for name, _ in self.named_parameters() if not name.startswith("maps.")]
        return rows(sites, *names) | listed(sites, "maps")

    def reset(self) -> None:
        for map_ in self.maps:
            nn.init.zeros_(map_)
        nn.init.constant_(self.scales, SCALE)
        # the logit of 1 / n; with one stream that is infinite, and a sigmoid of 8 is close to 1
        nn.init.constant_(self.read_bias, -math.log(self.streams - 1) if self.streams > 1 else 8.0)
        nn.init.zeros_(self.write_bias)
        nn.init.zeros_(self.mix_bias)

    def matrix(self, logits: torch.Tensor) -> torch.Tensor:
        """The matrices (..., n, n) of logits (..., k)."""
        raise NotImplementedError

    def weights(self, state: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pre: (B, T, n), post: (B, T, n) and mix: (B, T, n, n) of a site."""
        flat = wide(state).flatten(-2)
        moved = F.rms_norm(flat, flat.shape[-1:], eps=self.shape.eps) @ self.maps[index].to(flat.dtype)
        read, write, mix = moved.split(self.sizes, dim=-1)
        scales, mix_scale = wide(self.scales[index]), SCALE
        if len(scales) == 3:
            mix_scale = scales[2]
        reads = torch.sigmoid(scales[0] * read + self.read_bias[index])
        writes = 2 * torch.sigmoid(scales[1] * write + self.write_bias[index])
        return reads, writes, self.matrix(mix_scale * mix + self.mix_bias[index])

    def read(self, state: torch.Tensor, site: Site) -> Read:
        reads, writes, mixes = (weights.to(state.dtype) for weights in self.weights(state, site.index))
        return Read((reads.unsqueeze(-2) @ state).squeeze(-2), carry=(mixes, writes))

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        mixes, writes = read.carry
        return mixes @ state + writes.unsqueeze(-1) * y.unsqueeze(-2)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return state.mean(-2) if self.summary == "mean" else state.sum(-2)
