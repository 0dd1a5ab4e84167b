"""LayerNorm scaling: what the norms of block l give is divided by the root of l.

    x' = x + F(norm(x) / sqrt(l))          l from 1, each turn of a loop a block of its own (R)

It keeps the variance of the Pre-LN stream from growing with depth, so that deep layers do more than pass it on. Initial
values are the recipe's.

Source: Sun et al., The Curse of Depth in Large Language Models, arXiv:2502.05795.
"""

from __future__ import annotations

import math
from typing import ClassVar

from deepen.registry import method
from deepen.stack.parametrisation import Place, Record, Rule


@method(
    "layernorm-scaling",
    family="parametrisation",
    source="arXiv:2502.05795",
    title="The Curse of Depth in Large Language Models",
    mechanism="the norms of block l divided by sqrt(l)",
    cost="D multiply-adds a site",
)
class LayerNormScaling(Rule):
    """A factor on what branches read."""

    deep: ClassVar[bool] = True
    reads_norms: ClassVar[bool] = True

    def record(self, place: Place) -> Record:
        return Record(forward=1 / math.sqrt(place.block)) if place.kind == "norm" else Record()
