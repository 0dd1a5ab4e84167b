"""The first feed-forward of transformers: two maps and a ReLU.

    u ── W_up ── relu ── W_down ── y         y = W_down relu(W_up u + b) + b

Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "relu",
    family="ffn",
    source="arXiv:1706.03762",
    title="Attention Is All You Need",
    mechanism="y = W_down relu(W_up u + b) + b",
    cost="two matrices; 4 D hidden values are usual",
)
class ReLU(Dense):
    """Two maps and a ReLU."""

    name = "relu"
    marks: ClassVar[Mapping[str, str]] = {"K": "the equation", "N": "y(c u) = c y(u) for c > 0, without biases"}
