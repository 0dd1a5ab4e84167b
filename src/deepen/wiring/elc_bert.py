"""ELC-BERT: every layer counts. The input of a visit is a learned mean of the outputs of all visits before it.

    in = sum_i softmax(w)_i h_i          h_0: embedding, h_i: output of visit i - 1; one w a visit
    z  = norm(Attention(norm(in)))       no residual
    h  = z + F(norm(z))

    h_0 ─┐
    h_1 ─┼─ softmax ── norm ── Attention ── norm ──┬── norm ── F ── + ── h_l
    ...  ┘                                         └────────────────┘

| variant | w at first | h |
|---|---|---|
| `base` | (0, ..., 0, 1) | z + F(norm(z)) |
| `zero` | 0 | z + F(norm(z)) |
| `normalized` | 0 | norm0(z + F(norm(in + z))), norm0 without a gain |

`weighted_output` puts such a mean before the final norm too. The feed-forward of the i-th visit, from 0, begins
multiplied by sqrt(1 / (2 (1 + i))). Weights belong to visits. Unlike the original, the norms before the parts have
gains, the feed-forward has no norm inside, and a final norm stays before the head (R).

Source: Charpentier and Samuel, Not all layers are equally as important: Every Layer Counts BERT, arXiv:2311.02265.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring
from deepen.wiring.entries import SOURCE, VISIT, Entries, numbered
from deepen.wiring.history import History


class Outputs(NamedTuple):
    """What the visits so far left, and inside a visit its input and the output of its mixer."""

    history: History
    entry: torch.Tensor | None = None
    z: torch.Tensor | None = None


@method(
    "elc-bert",
    family="wiring",
    source="arXiv:2311.02265",
    title="Not all layers are equally as important: Every Layer Counts BERT",
    mechanism="each visit reads a softmax-weighted mean of all earlier outputs, without a residual",
    cost="i + 1 multiply-adds a channel before visit i, one more norm a mixer; the outputs of all visits are kept",
)
class ELCBert(Wiring):
    """Means over depth in the place of the residual around the mixer.

    Args:
        shape: what it is built for.
        variant: of the table.
        weighted_output: whether the head sees a mean of all outputs too.
    """

    after = "a"
    refuses: ClassVar[Mapping[str, str]] = {
        "group": "its weights belong to one sequence of visits, and branches have none",
        "scale": "its sources are outputs of visits, and a damped stretch is none",
        "gate": "its sources are outputs of visits, and a gated stretch is none",
        "entry": "a visit reads a mean of outputs, not the stream that is changed at the entry",
        "inject": "a visit reads a mean of outputs, not the stream that is injected into",
        "n..m": "a skipped turn leaves no output, but each output has a weight of its own",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, their variants and initial values",
        "N": "the weights sum to 1 and their gradients to 0",
        "R": "gains of the norms before the parts, no norm inside the feed-forward, the final norm, single parts",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        variant: Literal["base", "zero", "normalized"] = "base",
        weighted_output: bool = False,
    ) -> None:
        super().__init__(shape)
        self.variant = variant
        visits = [site.visit for site in shape.sites]
        self.first = {visits.index(visit) for visit in visits}
        self.last = {len(visits) - 1 - visits[::-1].index(visit) for visit in visits}
        # Of the visits from the second on: the first has one source.
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(visit + 1)) for visit in range(1, shape.visits))
        self.output = nn.Parameter(torch.empty(shape.visits + 1)) if weighted_output else None
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        found = {
            f"weights.{visit - 1}": Entries("weights", (VISIT, visit), (numbered(SOURCE, visit + 1),))
            for visit in range(1, self.shape.visits)
        }
        if self.output is not None:
            found["output"] = Entries("output", None, (numbered(SOURCE, self.shape.visits + 1),))
        return found

    def reset(self) -> None:
        outputs = [] if self.output is None else [self.output]
        for weights in [*self.weights, *outputs]:
            nn.init.zeros_(weights)
            if self.variant == "base":
                weights.data[-1] = 1

    def initialise(self, layers: Mapping[int, nn.Module]) -> None:
        order = {site.key.layer: site.visit for site in reversed(self.shape.sites)}
        with torch.no_grad():
            for index, layer in layers.items():
                feed_forward: Any = layer.get_submodule("f.sublayer")
                for matrix in feed_forward.matrices():
                    matrix *= math.sqrt(1 / (2 * (1 + order[index])))

    def init(self, x: torch.Tensor, earlier: Earlier) -> Outputs:
        return Outputs(History.start(x, self.shape.visits + 1))

    def read(self, state: Outputs, site: Site) -> Read:
        if site.index in self.first:
            sources = state.history.sources
            own = self.weights[site.visit - 1].softmax(0) if site.visit else None
            entry = sources[0] if own is None else state.history.mix(own)
            return Read(entry, carry=entry)
        entry, z = state.entry, state.z
        assert entry is not None
        assert z is not None
        return Read(entry + z if self.variant == "normalized" else z, carry=entry)

    def write(self, state: Outputs, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Outputs:
        entry = read.carry
        z = norm(y) if site.part == "a" else (entry if state.z is None else state.z) + y
        if site.index not in self.last:
            return Outputs(state.history, entry, z)
        if self.variant == "normalized":
            z = F.layer_norm(z, z.shape[-1:], eps=self.shape.eps)
        return Outputs(state.history.push(z))

    def readout(self, state: Outputs) -> torch.Tensor:
        return state.history.sources[-1] if state.z is None else state.z

    def finish(self, state: Outputs) -> torch.Tensor:
        return self.readout(state) if self.output is None else state.history.mix(self.output.softmax(0))
