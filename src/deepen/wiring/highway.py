"""Highway: a learned gate on each channel chooses between the stream and the output of the branch.

    x' = g * F(norm(x)) + (1 - g) * x          g = sigmoid(W x + b): (D) a token

    x ──┬── norm ── F ── (* g) ───── + ── x'
        ├── sigmoid(W x + b) = g     │
        └───────── (* (1 - g)) ──────┘

W begins at 0 and b below 0 (R: the same at every depth), so that the stream is carried on at first: the deeper the
model, the lower b should begin, -1 to -3. W and b belong to sites. The paper's layers have no norm; here the branch
reads the norm of the stream (R).

Source: Srivastava et al., Highway Networks, arXiv:1505.00387.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring
from deepen.wiring.entries import SITE, Entries, numbered, rows


@method(
    "highway",
    family="wiring",
    source="arXiv:1505.00387",
    title="Highway Networks",
    mechanism="g * F(norm(x)) + (1 - g) * x, a gate for each channel and token",
    cost="D^2 + D parameters and D^2 multiply-adds a token and site",
)
class Highway(Wiring):
    """The update and the stream share one weight of 1 on each channel.

    Args:
        shape: what it is built for.
        bias: b at first.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation, gates that begin below one half",
        "N": "the stream with closed gates, the output with open ones, values between the two",
        "R": "W = 0 at first, the norm before the branch, a gate for each site",
    }

    def __init__(self, shape: Shape, *, bias: float = -1.0) -> None:
        super().__init__(shape)
        self.bias = bias
        self.maps = nn.Parameter(torch.empty(len(shape.sites), shape.width, shape.width))
        self.biases = nn.Parameter(torch.empty(len(shape.sites), shape.width))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        return rows(numbered(SITE, len(self.shape.sites)), "maps", "biases")

    def reset(self) -> None:
        nn.init.zeros_(self.maps)
        nn.init.constant_(self.biases, self.bias)

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        gate = torch.sigmoid(F.linear(state, self.maps[site.index], self.biases[site.index]))
        return torch.lerp(state, y, gate)
