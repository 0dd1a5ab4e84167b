"""Attention Residuals: a site reads a softmax over the outputs of the sites before it, in the place of their sum.

    v_0 = embedding, v_i = output of site i - 1
    p   = softmax_i(w . RMSNorm(v_i))          one query w a site, no 1 / sqrt(D)
    u   = m sum_i p_i v_i                      m: the number of sources; the values are not normalised
    y   = F(norm(u))

    v_0 ─┐
    v_1 ─┼── softmax over depth ── u ── norm ── F ── v_i+1
    v_i ─┘

In blocks of `block` sites the sources are the embedding, the sums of the finished blocks, and the sum so far of the
block that is being computed. The stack's readout has a query too. Queries are 0 at first, so every source has the same
share. Parameters belong to sites; the first site has one source and so no query.

The factor m is ours: the norm takes it away, so the function is the paper's, but with it the first u is the stream of
the Pre-LN model itself, and the eps of trained norms keeps its weight.

Source: Kimi Team, Attention Residuals, arXiv:2603.15031.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring, wide
from deepen.wiring.entries import FIXED, SITE, Entries, numbered, rows
from deepen.wiring.history import History


class Sources(NamedTuple):
    """What a site can read.

    Attributes:
        history: the embedding and the finished blocks, of one site each in the full form.
        inverse: 1 / RMS of each of them, each (B, T).
        part: the sum so far of the block that is being computed, or None before its first site.
        sites: how many sites that block has so far.
    """

    history: History
    inverse: tuple[torch.Tensor, ...]
    part: torch.Tensor | None
    sites: int


@method(
    "attention-residuals",
    family="wiring",
    source="arXiv:2603.15031",
    title="Attention Residuals",
    mechanism="each site reads a softmax over earlier outputs, or over sums of blocks of them",
    cost="about 2 multiply-adds a channel, source and site; all sources are kept",
)
class AttentionResiduals(Wiring):
    """Softmax over depth in the place of the residual sum.

    Args:
        shape: what it is built for.
        block: sites of a block; 1 is the full form.
    """

    equals = "Pre-LN: with equal shares a site reads the sum of all sources"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its sources are outputs of one sequence of sites, and branches are none",
        "scale": "its sources are outputs of sites, and a damped stretch is none",
        "gate": "its sources are outputs of sites, and a gated stretch is none",
        "entry": "a site reads a mix of outputs, not the stream that is changed at the entry",
        "inject": "a site reads a mix of outputs, not the stream that is injected into",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, blocks, queries of 0 at first",
        "N": "the equality with Pre-LN of both forms",
        "R": "the factor m, which the norm takes away",
    }

    def __init__(self, shape: Shape, *, block: Annotated[int, Field(ge=1)] = 1) -> None:
        super().__init__(shape)
        self.block = block
        # Of the sites from the second on, and of the readout.
        self.queries = nn.Parameter(torch.empty(len(shape.sites), shape.width))
        self.gains = nn.Parameter(torch.empty(len(shape.sites), shape.width))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return rows([*numbered(SITE, len(self.shape.sites))[1:], (FIXED, 0)], "queries", "gains")

    def reset(self) -> None:
        nn.init.zeros_(self.queries)
        nn.init.ones_(self.gains)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Sources:
        room = 1 + -(-len(self.shape.sites) // self.block)
        return Sources(History.start(x, room), (self._inverse(x),), None, 0)

    def read(self, state: Sources, site: Site) -> Read:
        return Read(self._mixed(state, site.index - 1))

    def write(self, state: Sources, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Sources:
        part, sites = y if state.part is None else state.part + y, state.sites + 1
        if sites < self.block:
            return Sources(state.history, state.inverse, part, sites)
        return Sources(state.history.push(part), (*state.inverse, self._inverse(part)), None, 0)

    def readout(self, state: Sources) -> torch.Tensor:
        return self._mixed(state, len(self.shape.sites) - 1)

    def _inverse(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(wide(x).square().mean(-1) + self.shape.eps)

    def _mixed(self, state: Sources, index: int) -> torch.Tensor:
        """The mix of a query over all sources; the only source itself where there is one."""
        history, part = state.history, state.part
        if part is None and len(history.sources) == 1:
            return history.sources[0]
        key = self.queries[index] * self.gains[index]
        logits = wide(history.dot(key)) * torch.stack(state.inverse)
        if part is None:
            return history.mix(len(logits) * logits.softmax(0))
        own = wide(part @ key) * self._inverse(part)
        shares = (1 + len(logits)) * torch.cat([logits, own.unsqueeze(0)]).softmax(0)
        return history.mix(shares[:-1]) + (shares[-1].unsqueeze(-1) * part).to(part.dtype)
