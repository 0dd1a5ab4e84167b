"""Stochastic depth: in training each update is dropped at random, late ones more often.

    training, inverted     x' = x + (b / p) F(norm(x))          b = 1 with probability p, else 0
    outside of it          x' = x + F(norm(x))
    training, paper        x' = x + b F(norm(x))
    outside of it          x' = x + p F(norm(x))

    x ──┬── norm ── F ── (x b) ── + ── x'          p = 1 - (l / L) (1 - last), visit l = 1 .. L
        └─────────────────────────┘

The two forms differ by a constant for each visit, so weights of one are not weights of the other. Each site draws for
itself, for each sequence or once for the batch. Draws come from torch's generator before the first site, so that a
visit that is computed again sees the same. A dropped branch is multiplied by 0, not skipped: no time is saved (R).

Source: Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Earlier, Norm, Shape, Wiring


class Drawn(NamedTuple):
    """The stream x: (B, T, D), and of each draw whether it keeps, (B or 1, draws); None outside of training."""

    x: torch.Tensor
    keeps: torch.Tensor | None


class RandomDepth(Wiring):
    """Pre-LN whose updates are multiplied by draws of 0 or 1 in training."""

    def __init__(self, shape: Shape, keep: Sequence[float], per: Literal["sequence", "batch"]) -> None:
        super().__init__(shape)
        self.keep, self.per = tuple(keep), per

    def init(self, x: torch.Tensor, earlier: Earlier) -> Drawn:
        if not self.training:
            return Drawn(x, None)
        chance = torch.tensor(self.keep, device=x.device)
        rows = len(x) if self.per == "sequence" else 1
        return Drawn(x, torch.rand(rows, len(chance), device=x.device) < chance)

    def read(self, state: Drawn, site: Site) -> Read:
        return Read(state.x)

    def readout(self, state: Drawn) -> torch.Tensor:
        return state.x

    def change(self, state: Drawn, function: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
        return state._replace(x=function(state.x))

    def combine(self, states: Sequence[Drawn], weights: Sequence[float | torch.Tensor]) -> Drawn:
        return states[0]._replace(x=super().combine([state.x for state in states], weights))


@method(
    "stochastic-depth",
    family="wiring",
    source="arXiv:1603.09382",
    title="Deep Networks with Stochastic Depth",
    mechanism="updates dropped at random in training, late ones more often",
    cost="a multiply a channel and site in training; dropped branches are computed all the same",
)
class StochasticDepth(RandomDepth):
    """Random updates in training.

    Args:
        shape: what it is built for.
        last: the probability with which the last visit's updates are kept.
        form: whether updates are divided by their probability in training, or multiplied by it outside.
        per: whether sequences draw for themselves.
    """

    equals = "Pre-LN outside of training, in the inverted form"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equations, probabilities that fall linearly with depth",
        "N": "Pre-LN when all are kept, the mean over draws, the probabilities of the first and last visit",
        "R": "blocks are visits, turns of loops included; dropped branches are computed",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        last: Annotated[float, Field(gt=0, le=1)] = 0.5,
        form: Literal["inverted", "paper"] = "inverted",
        per: Literal["sequence", "batch"] = "sequence",
    ) -> None:
        depth = shape.depth
        keep = [1 - (place + 1) / depth.visits * (1 - last) for place in depth.places]
        super().__init__(shape, keep, per)
        self.form = form

    def constants(self) -> Mapping[str, str]:
        words = "each probability follows from the place of a visit among all"
        return {"places": words, "visits": words}

    def write(self, state: Drawn, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> Drawn:
        chance = self.keep[site.index]
        if state.keeps is None:
            return state._replace(x=state.x + (y if self.form == "inverted" else chance * y))
        factor = state.keeps[:, site.index, None, None].to(y.dtype)
        return state._replace(x=state.x + (factor / chance if self.form == "inverted" else factor) * y)
