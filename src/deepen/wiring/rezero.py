"""ReZero: no norm at all, and one learned factor a block that begins at 0.

    x' = x + a F(x)           a = 0 at first

    x ──┬── F ── (x a) ── + ── x'
        └─────────────────┘

The model is the identity at first: branches get no gradient in the first step, and the factors do. One factor belongs
to a visit, shared by its parts, or to each site.

Source: Bachlechner et al., ReZero is All You Need, arXiv:2003.04887.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring
from deepen.wiring.entries import SITE, VISIT, Entries, numbered, rows


@method(
    "rezero",
    family="wiring",
    source="arXiv:2003.04887",
    title="ReZero is All You Need: Fast Convergence at Large Depth",
    mechanism="x + a F(x), a = 0 at first, no norms",
    cost="a factor a visit; no norms",
)
class ReZero(Wiring):
    """A gate for each visit in the place of norms.

    Args:
        shape: what it is built for.
        per: whether a factor belongs to a visit or to a site.
    """

    before = ""
    final = False
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation",
        "N": "the identity at first, and which gradients are 0",
        "R": "no final norm; turns of a loop have factors of their own",
    }

    def __init__(self, shape: Shape, *, per: Literal["visit", "site"] = "visit") -> None:
        super().__init__(shape)
        self.per = per
        self.factors = nn.Parameter(torch.empty(shape.visits if per == "visit" else len(shape.sites)))
        self.reset()

    def entries(self) -> Mapping[str, Entries]:
        kind = VISIT if self.per == "visit" else SITE
        return rows(numbered(kind, len(self.factors)), "factors")

    def reset(self) -> None:
        nn.init.zeros_(self.factors)

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + self.factors[site.visit if self.per == "visit" else site.index] * y
