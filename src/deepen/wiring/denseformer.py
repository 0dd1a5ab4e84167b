"""DenseFormer: the input of a visit is a learned weighted sum of the outputs of all visits before it.

    Y_i = sum_j alpha_ij X_j       X_0: embedding, X_j: what visit j - 1 left, before any averaging

    X_0 ──────────────────┐
    X_1 ──────────────────┼── alpha ── Y_i ── visit i + 1 ── X_i+2
    ...                   │
    visit i ── X_i+1 ─────┘

Averaged after every `period`-th visit, over every `dilation`-th source counted back from the newest; the newest has
weight 1 at first and the others 0. A visit is an ordinary Pre-LN layer on Y_i. Weights belong to visits, so each turn
of a loop has its own, and sources are visits too.

Source: Pagliardini et al., DenseFormer, arXiv:2402.02622.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import SOURCE, VISIT, Entries, Label
from deepen.wiring.history import History


class Dense(NamedTuple):
    """The stream inside a visit, and what the visits before it left."""

    x: torch.Tensor
    history: History


@method(
    "denseformer",
    family="wiring",
    source="arXiv:2402.02622",
    title="DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
    mechanism="each visit reads a learned weighted sum of all earlier outputs",
    cost="i + 1 multiply-adds a channel after visit i; the outputs of all visits are kept",
)
class DenseFormer(Wiring):
    """Depth-weighted averages after visits.

    Args:
        shape: what it is built for.
        period: average after every so many visits.
        dilation: take every so many sources, counted back from the newest.
    """

    equals = "Pre-LN, bit for bit"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its weights belong to one sequence of visits, and branches have none",
        "scale": "the outputs that it keeps are those of visits, and a damped stretch is none",
        "gate": "the outputs that it keeps are those of visits, and a gated stretch is none",
        "n..m": "a skipped turn leaves no output, but the newest output has a weight of its own",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equation, period and dilation, initial weights",
        "N": "the equality with Pre-LN, bit for bit, and the number of weights",
        "R": "visits are the blocks, so turns of a loop have weights of their own",
    }

    def __init__(
        self, shape: Shape, *, period: Annotated[int, Field(ge=1)] = 1, dilation: Annotated[int, Field(ge=1)] = 1
    ) -> None:
        super().__init__(shape)
        # the last site of each visit
        self.last = {site: visit for visit, site in {site.visit: site.index for site in shape.sites}.items()}
        self.dilation = dilation
        self.weights = nn.ParameterDict({
            str(visit): nn.Parameter(torch.empty(len(range(visit + 1, -1, -dilation))))
            for visit in range(shape.visits)
            if (visit + 1) % period == 0
        })  # fmt: skip
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        found: dict[str, Entries] = {}
        for name in self.weights:
            sources = range((int(name) + 1) % self.dilation, int(name) + 2, self.dilation)
            labels: list[Label] = [(SOURCE, source) for source in sources]
            found[f"weights.{name}"] = Entries("weights", (VISIT, int(name)), (labels,), fresh=0)
        return found

    def reset(self) -> None:
        for weights in self.weights.values():
            nn.init.zeros_(weights)
            weights.data[-1] = 1

    def init(self, x: torch.Tensor, earlier: Earlier) -> Dense:
        return Dense(x, History.start(x, self.shape.visits + 1))

    def read(self, state: Dense, site: Site) -> Read:
        return Read(state.x)

    def write(self, state: Dense, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Dense:
        x = state.x + y
        visit = self.last.get(site.index)
        if visit is None:
            return Dense(x, state.history)
        history = state.history.push(x)
        name = str(visit)
        if name not in self.weights:
            return Dense(history.sources[-1], history)
        weights = self.weights[name]
        if self.dilation > 1:
            spread = weights.new_zeros(visit + 2)
            weights = spread.index_copy(0, self._places(visit, weights.device), weights)
        return Dense(history.mix(weights), history)

    def _places(self, visit: int, device: torch.device) -> torch.Tensor:
        return torch.arange((visit + 1) % self.dilation, visit + 2, self.dilation, device=device)

    def readout(self, state: Dense) -> torch.Tensor:
        return state.x

    def change(self, state: Dense, function: Callable[[torch.Tensor], torch.Tensor]) -> Dense:
        # What the next visit starts from; the outputs that are kept stay those of visits.
        return Dense(function(state.x), state.history)
