"""Pre-LN: the reference that other wirings are compared with.

    x' = x + F(norm(x))

    x ──┬── norm ── F ── + ── x'
        └────────────────┘

Source: Xiong et al., On Layer Normalization in the Transformer Architecture, arXiv:2002.04745.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Wiring


@method(
    "pre-ln",
    family="wiring",
    source="arXiv:2002.04745",
    title="On Layer Normalization in the Transformer Architecture",
    mechanism="x + F(norm(x))",
    cost="nothing; the reference",
)
class PreLN(Wiring):
    """The stream is the embedding and the sum of all outputs: with outputs of 0 it stays the embedding, bit for bit."""

    equals = "itself"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation",
        "N": "the stream is the embedding and the sum of all outputs",
    }

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + y
