"""Deep Delta Learning: a site replaces what the stream holds along one direction, instead of adding to it.

    k  = F(norm(x)) / |F(norm(x))|                 the direction
    b  = 2 sigmoid(w_b . RMSNorm(x) + c_b)         how much of it: 0 nothing, 1 projection, 2 reflection
    x' = x + b (v - k . x) k                       v: what stands there afterwards

    x ──┬── norm ── F ── unit ── k
        ├── b, v ───────────── b (v - k . x) k ── + ── x'
        └─────────────────────────────────────────┘

v is 2, or a learned function of the stream: `linear` or `sigmoid` of it. Not Pre-LN at first: b begins at `start`. The
gain of the norm is part of w_b. Parameters belong to sites. `deep_delta_matrix.py` has a stream with several values.

Source: Zhang et al., Deep Delta Learning, arXiv:2601.00417.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring, wide
from deepen.wiring.entries import SITE, Entries, numbered, rows

# Below this length an output is divided by it, not by its own.
SHORT = 1e-6
# v where it is a constant.
VALUE = 2.0


def direction(y: torch.Tensor) -> torch.Tensor:
    """The outputs (..., D) of a sublayer at length 1."""
    return F.normalize(y, dim=-1, eps=SHORT)


class Strength(nn.Module):
    """b of each site, (..., 1), from what it reads.

    Args:
        shape: what the wiring is built for.
        start: b at first.
    """

    def __init__(self, shape: Shape, start: float) -> None:
        super().__init__()
        self.start, self.eps = start, shape.eps
        self.weight = nn.Parameter(torch.empty(len(shape.sites), shape.width))
        self.bias = nn.Parameter(torch.empty(len(shape.sites)))

    def reset(self) -> None:
        """w_b = 0, so that b is `start`."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(self.start / (2 - self.start)))

    def forward(self, u: torch.Tensor, site: Site) -> torch.Tensor:
        u = wide(u)
        normed = F.rms_norm(u, u.shape[-1:], eps=self.eps)
        logit = normed @ self.weight[site.index].to(u.dtype) + self.bias[site.index]
        return 2 * torch.sigmoid(logit).unsqueeze(-1)


@method(
    "deep-delta",
    family="wiring",
    source="arXiv:2601.00417",
    title="Deep Delta Learning",
    mechanism="x + b (v - k . x) k along the direction k of the output",
    cost="about 3 multiply-adds a channel and site",
)
class DeepDelta(Wiring):
    """The stream of one value a channel.

    Args:
        shape: what it is built for.
        value: what v is.
        start: b at first.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations, v = 2, b = 1 at first",
        "N": "what stands along k afterwards, and that the rest stays",
        "R": "initial weights of b and v; the gain of the norm is part of w_b",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        value: Literal["constant", "linear", "sigmoid"] = "constant",
        start: Annotated[float, Field(gt=0, lt=2)] = 1.0,
    ) -> None:
        super().__init__(shape)
        self.value = value
        self.strength = Strength(shape, start)
        if value != "constant":
            self.value_weight = nn.Parameter(torch.empty(len(shape.sites), shape.width))
            self.value_bias = nn.Parameter(torch.empty(len(shape.sites)))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return rows(numbered(SITE, len(self.shape.sites)), *(name for name, _ in self.named_parameters()))

    def reset(self) -> None:
        self.strength.reset()
        if self.value != "constant":
            nn.init.zeros_(self.value_weight)
            nn.init.zeros_(self.value_bias)

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        k = direction(y)
        change = self._target(state, site) - (k * state).sum(-1, keepdim=True)
        return state + (self.strength(read.u, site) * change).to(state.dtype) * k

    def _target(self, state: torch.Tensor, site: Site) -> float | torch.Tensor:
        """v: (..., 1)."""
        if self.value == "constant":
            return VALUE
        value = (state @ self.value_weight[site.index] + self.value_bias[site.index]).unsqueeze(-1)
        return torch.sigmoid(value) if self.value == "sigmoid" else value
