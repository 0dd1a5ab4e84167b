"""The gated feed-forward with ReLU: gates are zero or linear.

    u ──┬── W_gate ── relu ────╮
        ╰── W_value ────────── * ── W_down ── y         y = W_down (relu(W_gate u) * W_value u)

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "reglu",
    family="ffn",
    source="arXiv:2002.05202",
    title="GLU Variants Improve Transformer",
    mechanism="y = W_down (relu(W_gate u) * W_value u)",
    cost="a third matrix, so 8/3 D hidden values cost as much as 4 D of a plain feed-forward",
)
class ReGLU(Dense):
    """A ReLU gate."""

    name = "reglu"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation and the width of 8/3 D",
        "N": "y(c u) = c^2 y(u) for c > 0 and not for c < 0",
    }
