"""Post-LN: the sum is normalised; without a final norm.

    x' = norm(x + F(x))

    x ──┬── F ── + ── norm ── x'
        └────────┘

Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
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
    "post-ln",
    family="wiring",
    source="arXiv:1706.03762",
    title="Attention Is All You Need",
    mechanism="norm(x + F(x)); no final norm",
    cost="one norm less than Pre-LN",
)
class PostLN(Wiring):
    """Every stream after the first site is an output of a norm."""

    before = ""
    after = "af"
    final = False
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation",
        "N": "every stream after the first site has a root mean square of 1",
    }

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(state + y)
