"""Vertical attention: the input of a visit is a learned mean of normalised outputs of all visits before it.

    u_l = sum_i softmax(w_l)_i h_i / RMS(h_i)          h_0: embedding, h_i: what visit i - 1 left; one w a visit
    h_l = an ordinary Pre-LN visit on u_l, with the residuals inside it

    h_0 / RMS ─┐
    h_1 / RMS ─┼─ softmax(w) ── u ──┬── norm ── attention ── + ──┬── norm ── feed-forward ── + ── h_l+1
    ...       ─┘                    └────────────────────────┘   └───────────────────────────┘

A reconstruction (R): of the paper an abstract and reviews were read. They confirm weights that do not depend on the
input, a softmax over the outputs of all layers before, and a division by the norm of these outputs; that the weights
begin at 0, that nothing else of the stream reaches the next visit, and which norm divides, is chosen here.

Source: Kojima et al., Vertical Attention, OpenReview A6uabXKiXc.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import SOURCE, VISIT, Entries, numbered
from deepen.wiring.history import History


class Normalised(NamedTuple):
    """What the visits so far left, each divided by its size; the stream x: (B, T, D) inside a visit, or after it."""

    history: History
    x: torch.Tensor


@method(
    "vertical-attention",
    family="wiring",
    source="OpenReview:A6uabXKiXc",
    title="Vertical Attention",
    mechanism="each visit reads a softmax-weighted mean of all earlier outputs, each divided by its size",
    cost="i + 1 multiply-adds a channel before visit i; the outputs of all visits are kept",
)
class VerticalAttention(Wiring):
    """Means over depth of outputs of one size."""

    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its weights belong to one sequence of visits, and branches have none",
        "scale": "its sources are outputs of visits, and a damped stretch is none",
        "gate": "its sources are outputs of visits, and a gated stretch is none",
        "entry": "a visit reads a mean of outputs, not the stream that is changed at the entry",
        "inject": "a visit reads a mean of outputs, not the stream that is injected into",
        "n..m": "a skipped turn leaves no output, but each output has a weight of its own",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "fixed weights, the softmax over all earlier outputs, a division by their size",
        "N": "the sum written out, and that the size of an output does not change what is read",
        "R": "the formula as a whole: initial weights, the root mean square, no other path around a visit",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        visits = [site.visit for site in shape.sites]
        self.first = {visits.index(visit) for visit in visits}
        self.last = {len(visits) - 1 - visits[::-1].index(visit) for visit in visits}
        # Of the visits from the second on: the first has one source.
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(visit + 1)) for visit in range(1, shape.visits))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return {
            f"weights.{visit - 1}": Entries("weights", (VISIT, visit), (numbered(SOURCE, visit + 1),))
            for visit in range(1, self.shape.visits)
        }

    def reset(self) -> None:
        for weights in self.weights:
            nn.init.zeros_(weights)

    def init(self, x: torch.Tensor, earlier: Earlier) -> Normalised:
        return Normalised(History.start(self._normalised(x), self.shape.visits + 1), x)

    def read(self, state: Normalised, site: Site) -> Read:
        if site.index not in self.first:
            return Read(state.x, carry=state.x)
        history = state.history
        u = history.mix(self.weights[site.visit - 1].softmax(0)) if site.visit else history.sources[0]
        return Read(u, carry=u)

    def write(self, state: Normalised, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Normalised:
        x, history = read.carry + y, state.history
        return Normalised(history.push(self._normalised(x)) if site.index in self.last else history, x)

    def readout(self, state: Normalised) -> torch.Tensor:
        return state.x

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.shape.eps)
