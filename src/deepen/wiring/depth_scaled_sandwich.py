"""Depth-scaled sandwich norm: the second norm's gain begins at c / sqrt(blocks), so that depth adds a fixed variance.

    x' = x + norm_after(F(norm_before(x)))        gain_after = c / sqrt(L) at first, trained

    x ──┬── norm ── F ── norm (c / sqrt L) ── + ── x'
        └─────────────────────────────────────┘

c is 0.283 for attention and 0.432 for feed-forwards: over all L blocks the updates add a variance of their squares'
sum, 0.2667, whatever L is. The recipe `tiny` of initial values belongs to it. Here L counts every turn of a loop (R).

Source: Yin et al., Pangu Ultra, arXiv:2504.07866.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from deepen.program.site import Depth, Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring


@method(
    "depth-scaled-sandwich",
    family="wiring",
    source="arXiv:2504.07866",
    title="Pangu Ultra: Pushing the Limits of Dense Large Language Models on Ascend NPUs",
    mechanism="x + norm(F(norm(x))), the second gain c / sqrt(blocks) at first",
    cost="one more norm a site",
)
class DepthScaledSandwich(Wiring):
    """Sandwich norm whose updates are small at first.

    Args:
        shape: what it is built for.
        attention: c of the mixer.
        feed_forward: c of the feed-forward.
    """

    after = "af"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equation and both constants",
        "N": "the size of every update at first",
        "R": "L counts the turns of loops",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        attention: Annotated[float, Field(gt=0)] = 0.283,
        feed_forward: Annotated[float, Field(gt=0)] = 0.432,
    ) -> None:
        super().__init__(shape)
        self.factors = {"a": attention, "f": feed_forward}

    def initialise(self, layers: Mapping[int, nn.Module]) -> None:
        for layer in layers.values():
            for part, constant in self.factors.items():
                norm: Any = layer.get_submodule(part).get_submodule("after")
                nn.init.constant_(norm.weight, constant / math.sqrt(self.shape.blocks))

    def constants(self) -> Mapping[str, str]:
        return {"blocks": "the gains of the second norms began at c / sqrt(blocks)"}

    def rescaled(self, before: Depth) -> Mapping[str, float]:
        return {f"{part}.after.weight": math.sqrt(before.blocks / self.shape.blocks) for part in "af"}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + norm(y)
