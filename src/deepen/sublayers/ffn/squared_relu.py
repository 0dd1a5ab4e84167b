"""Two maps and the square of a ReLU, as in Primer.

    u ── W_up ── relu^2 ── W_down ── y         y = W_down relu(W_up u + b)^2 + b

Source: So et al., Primer, arXiv:2109.08668.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from deepen.registry import method
from deepen.sublayers.ffn.dense import Dense


@method(
    "squared-relu",
    family="ffn",
    source="arXiv:2109.08668",
    title="Primer: Searching for Efficient Transformers for Language Modeling",
    mechanism="y = W_down relu(W_up u + b)^2 + b",
    cost="two matrices; 4 D hidden values are usual",
)
class SquaredReLU(Dense):
    """Two maps and a squared ReLU."""

    name = "squared-relu"
    marks: ClassVar[Mapping[str, str]] = {"K": "the equation", "N": "y(c u) = c^2 y(u) for c > 0, without biases"}
