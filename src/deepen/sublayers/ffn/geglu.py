"""The gated feed-forward with GELU, as in T5 1.1 and Gemma; `gelu: none` is the exact one, `tanh` Gemma's.

    u ──┬── W_gate ── gelu ────╮
        ╰── W_value ────────── * ── W_down ── y         y = W_down (gelu(W_gate u) * W_value u)

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "geglu",
    family="ffn",
    source="arXiv:2002.05202",
    title="GLU Variants Improve Transformer",
    mechanism="y = W_down (gelu(W_gate u) * W_value u)",
    cost="a third matrix, so 8/3 D hidden values cost as much as 4 D of a plain feed-forward",
)
class GEGLU(Dense):
    """A GELU gate."""

    name = "geglu"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation and the width of 8/3 D",
        "N": "the equation written out, in both forms of the GELU",
    }
