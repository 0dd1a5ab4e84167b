"""Sandwich norm: the output of a sublayer is normalised too.

    x' = x + norm_after(F(norm_before(x)))

    x ──┬── norm ── F ── norm ── + ── x'
        └────────────────────────┘

Nothing but the gain of the second norm sets the size of an update: a branch without biases may be multiplied by any
positive number.

Source: Ding et al., CogView, arXiv:2105.13290.
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
    "sandwich",
    family="wiring",
    source="arXiv:2105.13290",
    title="CogView: Mastering Text-to-Image Generation via Transformers",
    mechanism="x + norm(F(norm(x)))",
    cost="one more norm a site",
)
class Sandwich(Wiring):
    """Two norms a site; Gemma 2 and 3 have this form."""

    after = "af"
    marks: ClassVar[Mapping[str, str]] = {"C": "the equation", "N": "the scale of a branch does not matter"}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return state + norm(y)
