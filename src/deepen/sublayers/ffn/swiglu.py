"""The gated feed-forward with SiLU, as in Llama, Mistral and Qwen.

    u ──┬── W_gate ── silu ────╮
        ╰── W_value ────────── * ── W_down ── y         y = W_down (silu(W_gate u) * W_value u)

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "swiglu",
    family="ffn",
    source="arXiv:2002.05202",
    title="GLU Variants Improve Transformer",
    mechanism="y = W_down (silu(W_gate u) * W_value u)",
    cost="a third matrix, so 8/3 D hidden values cost as much as 4 D of a plain feed-forward",
)
class SwiGLU(Dense):
    """A SiLU gate."""

    name = "swiglu"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation and the width of 8/3 D",
        "N": "the equation written out; Llama's width of 11008 at D = 4096",
    }
