"""A product of two linear maps, without any activation.

    u ──┬── W_gate ────────────╮
        ╰── W_value ────────── * ── W_down ── y         y = W_down (W_gate u * W_value u)

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "bilinear",
    family="ffn",
    source="arXiv:2002.05202",
    title="GLU Variants Improve Transformer",
    mechanism="y = W_down (W_gate u * W_value u)",
    cost="a third matrix, so 8/3 D hidden values cost as much as 4 D of a plain feed-forward",
)
class Bilinear(Dense):
    """No activation: the output is quadratic in the input."""

    name = "bilinear"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation and the width of 8/3 D",
        "N": "y(c u) = c^2 y(u) for every c, and the two halves change places",
    }
