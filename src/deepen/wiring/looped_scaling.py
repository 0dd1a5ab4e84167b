"""Looped residual scaling: Pre-LN whose updates are divided by the rounds and by the root of the distinct layers.

    x' = x + eps F(norm(x))         eps = lambda / (R sqrt(L))

    x ──┬── norm ── F ── (x eps) ── + ── x'
        └───────────────────────────┘

L: layers of the bank. R: rounds, here the visits of the layer that is run, so that a program may loop a part of the
bank (R).

Source: arXiv:2606.18524, read as an abstract alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring


@method(
    "looped-scaling",
    family="wiring",
    source="arXiv:2606.18524",
    title="Looped residual scaling",
    mechanism="x + F(norm(x)) lambda / (rounds sqrt(layers))",
    cost="D multiply-adds a site",
)
class LoopedScaling(Wiring):
    """Pre-LN with a constant factor on each update.

    Args:
        shape: what it is built for.
        strength: lambda.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "C": "the factor, from the abstract",
        "R": "rounds are the visits of each layer, every loop at its maximum",
    }

    def __init__(self, shape: Shape, *, strength: Annotated[float, Field(gt=0)] = 1.0) -> None:
        super().__init__(shape)
        depth = shape.depth
        self.factors = [strength / (times * math.sqrt(depth.layers)) for times in depth.rounds]

    def constants(self) -> Mapping[str, str]:
        words = "updates are divided by the rounds and by the root of the number of layers"
        return {"layers": words, "rounds": words}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + self.factors[site.index] * y
