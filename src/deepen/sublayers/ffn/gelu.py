"""Two maps and a GELU, as in BERT (`gelu: none`) and GPT-2 (`gelu: tanh`).

    u ── W_up ── gelu ── W_down ── y         y = W_down gelu(W_up u + b) + b

Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "gelu",
    family="ffn",
    source="arXiv:1606.08415",
    title="Gaussian Error Linear Units (GELUs)",
    mechanism="y = W_down gelu(W_up u + b) + b",
    cost="two matrices; 4 D hidden values are usual",
)
class GELU(Dense):
    """Two maps and a GELU."""

    name = "gelu"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation",
        "N": "the equation written out, in both forms of the GELU",
    }
