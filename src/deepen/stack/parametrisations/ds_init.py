"""DS-Init: the matrices of block l begin smaller by the root of l, so that each layer adds less the deeper it is.

    std of block l = a s / sqrt(l)         l from 1, s: what the recipe gives

There it is a uniform distribution; here the recipe's (R). a = 1/sqrt(2) is OpenLM's form. A layer of a loop has the l
of its first visit (R).

Source: Zhang et al., Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention,
arXiv:1908.11365.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from deepen.registry import method
from deepen.stack.parametrisation import Place, Record, Rule, Scale


@method(
    "ds-init",
    family="parametrisation",
    source="arXiv:1908.11365",
    title="Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention",
    mechanism="matrices of block l begin divided by sqrt(l)",
    cost="nothing",
)
class DepthScaledInit(Rule):
    """Initial values by block.

    Args:
        scale: of the model.
        a: factor of all.
    """

    recipes: ClassVar[Sequence[str]] = ("normal", "small")
    deep: ClassVar[bool] = True

    def __init__(self, scale: Scale, *, a: Annotated[float, Field(gt=0)] = 1.0) -> None:
        super().__init__(scale)
        self.a = a

    def record(self, place: Place) -> Record:
        inside = place.kind in ("matrix", "output")
        return Record(init=self.a / math.sqrt(place.block)) if inside else Record()
