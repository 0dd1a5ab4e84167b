"""DeepCrossAttention: queries, keys and values of a visit are three gated sums of the outputs of all visits before it.

    g   = sum_i f_i * (b_i + relu(w . f_i))          f_0: embedding; b_i: (D) a source, w: (D), three pairs a visit
    a   = Attention(norm(g_q), norm(g_k), norm(g_v))
    f_t = a + F(norm(a + g_q))                       no residual inside f_t

    f_0 ─┐    ┌─ g_k, g_v ─ norm ─┐
    ...  ├────┤                   attention ── a ──┬───────────────────────── + ── f_t
    f_i ─┘    └─ g_q ──┬── norm ──┘                + ── norm ── F ────────────┘
                       └───────────────────────────┘

One more such sum of all outputs goes to the final norm. b is 1 and w is 0 at first: each sum is then the stream of the
Pre-LN model. The slope of the relu at 0 is taken as 1, since with 0, as usual, w would have no gradient at first and
would never leave 0 (R). With `keep: k` only f_0 and the last k outputs are sources, and the sum of those between is
one more. Marks and hooks see the plain sum of all outputs (R). Parameters belong to visits; a visit without a mixer
has one sum (R). The three reads share the norm of the layer.

Source: Heddes et al., DeepCrossAttention: Supercharging Transformer Residual Connections, arXiv:2502.06785.
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
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import FIXED, SOURCE, VISIT, Entries, Label, numbered


class Outputs(NamedTuple):
    """The sources of a sum, each (B, T, D), and inside a visit what its parts so far gave and the read of its queries.

    Attributes:
        first: the embedding.
        between: the sum of the outputs that are no sources of their own; None before there are any.
        recent: the others, oldest first.
        given: the sum of the outputs of the visit's sites so far; None before the first.
        query: what the first site of the visit read.
    """

    first: torch.Tensor
    between: torch.Tensor | None = None
    recent: tuple[torch.Tensor, ...] = ()
    given: torch.Tensor | None = None
    query: torch.Tensor | None = None

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return (self.first, *(() if self.between is None else (self.between,)), *self.recent)


class Sum(nn.Module):
    """g of the formula.

    Args:
        sources: how many.
        width: D.
    """

    def __init__(self, sources: int, width: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.empty(sources, width))
        self.w = nn.Parameter(torch.empty(width))
        self.reset()

    def reset(self) -> None:
        nn.init.ones_(self.b)
        nn.init.zeros_(self.w)

    def forward(self, sources: tuple[torch.Tensor, ...]) -> torch.Tensor:
        # source by source, so that no copy of all of them is made; clamp has a slope of 1 at 0
        total: torch.Tensor | None = None
        for source, b in zip(sources, self.b.unbind(0), strict=True):
            total = source * b if total is None else torch.addcmul(total, source, b)
            total = torch.addcmul(total, source, (source @ self.w).clamp(min=0).unsqueeze(-1))
        assert total is not None
        return total


@method(
    "deep-cross-attention",
    family="wiring",
    source="arXiv:2502.06785",
    title="DeepCrossAttention: Supercharging Transformer Residual Connections",
    mechanism="queries, keys and values read three gated sums of all earlier outputs",
    cost="9 (i + 1) multiply-adds a channel before visit i; the outputs of all visits, or the last k, are kept",
)
class DeepCrossAttention(Wiring):
    """Gated sums of outputs in the place of the stream.

    Args:
        shape: what it is built for.
        keep: outputs that stay sources of their own; None: all.
    """

    equals = "Pre-LN: the sums are its stream"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its sources are outputs of one sequence of visits, and branches are none",
        "scale": "its sources are outputs of visits, and a damped stretch is none",
        "gate": "its sources are outputs of visits, and a gated stretch is none",
        "entry": "a visit reads sums of outputs, not the stream that is changed at the entry",
        "inject": "a visit reads sums of outputs, not the stream that is injected into",
        "n..m": "a skipped turn leaves no output, but each output has weights of its own",
        "kv": "a visit that shares a slot would never use its sums for keys and values",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, b = 1 and w = 0 at first, the sum of outputs between the first and the last k",
        "N": "the equality with Pre-LN, the sums written out",
        "R": "the slope of the relu at 0, one norm for the three reads, visits of one part, what marks see",
    }

    def __init__(self, shape: Shape, *, keep: Annotated[int, Field(ge=1)] | None = None) -> None:
        super().__init__(shape)
        self.keep = keep
        self.last = {site.visit: site.index for site in shape.sites}
        self.first = {site.visit: site for site in reversed(shape.sites)}
        self.sums = nn.ModuleDict()
        for visit, site in sorted(self.first.items()):
            for way in "qkv" if site.part == "a" else "q":
                self.sums[f"{visit}{way}"] = Sum(self._sources(visit), shape.width)
        self.sums["end"] = Sum(self._sources(shape.visits), shape.width)

    def entries(self) -> Mapping[str, Entries]:
        found: dict[str, Entries] = {}
        for name in self.sums:
            visit, way = (None, "end") if name == "end" else (int(name[:-1]), name[-1])
            owner = (FIXED, 0) if visit is None else (VISIT, visit)
            found[f"sums.{name}.w"] = Entries(f"{way}.w", owner)
            labels = self._labels(self.shape.visits if visit is None else visit)
            found[f"sums.{name}.b"] = Entries(f"{way}.b", owner, (labels,))
        return found

    def _labels(self, visits: int) -> list[Label]:
        """What the sources are after so many visits."""
        known = numbered(SOURCE, visits + 1)
        if self.keep is None or visits <= self.keep:
            return known
        return [known[0], (FIXED, 0), *known[-self.keep :]]

    def reset(self) -> None:
        for each in self.sums.children():
            each.reset()  # pyright: ignore[reportCallIssue]

    def _sources(self, visits: int) -> int:
        """Sources after so many visits."""
        return 1 + visits if self.keep is None or visits <= self.keep else 2 + self.keep

    def init(self, x: torch.Tensor, earlier: Earlier) -> Outputs:
        return Outputs(x)

    def read(self, state: Outputs, site: Site) -> Read:
        if site.index != self.first[site.visit].index:
            assert state.given is not None
            assert state.query is not None
            return Read(state.given + state.query, carry=state.query)
        sources = state.sources
        query = self.sums[f"{site.visit}q"](sources)
        if site.part == "f":
            return Read(query, carry=query)
        return Read(query, self.sums[f"{site.visit}k"](sources), self.sums[f"{site.visit}v"](sources), carry=query)

    def write(self, state: Outputs, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Outputs:
        given = y if state.given is None else state.given + y
        if site.index != self.last[site.visit]:
            return state._replace(given=given, query=read.carry)
        recent, between = (*state.recent, given), state.between
        if self.keep is not None and len(recent) > self.keep:
            oldest, *rest = recent
            between, recent = oldest if between is None else between + oldest, tuple(rest)
        return Outputs(state.first, between, recent)

    def readout(self, state: Outputs) -> torch.Tensor:
        total = sum(state.sources[1:], state.sources[0])
        return total if state.given is None else total + state.given

    def finish(self, state: Outputs) -> torch.Tensor:
        return self.sums["end"](state.sources)
