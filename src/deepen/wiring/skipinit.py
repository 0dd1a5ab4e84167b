"""SkipInit: no norm at all, and one learned factor at the end of each branch that begins at 0.

    x' = x + a F(x)           a = 0 at first, one for each site

    x ──┬── F ── (x a) ── + ── x'
        └─────────────────┘

The paper puts the factor into convolutional residual networks in the place of batch norm; for attention and
feed-forward this is ReZero with a factor for each site (R), and the two are one function.

Source: De and Smith, Batch Normalization Biases Residual Blocks Towards the Identity Function, arXiv:2002.10444.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.wiring.base import Shape
from deepen.wiring.rezero import ReZero


@method(
    "skipinit",
    family="wiring",
    source="arXiv:2002.10444",
    title="Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks",
    mechanism="x + a F(x), a = 0 at first at the end of each branch, no norms",
    cost="a factor a site; no norms",
)
class SkipInit(ReZero):
    """ReZero with a factor for each branch."""

    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation",
        "N": "the identity at first, and the equality with ReZero that has a factor a site",
        "R": "the branches are attention and feed-forward, and there is no final norm",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, per="site")
