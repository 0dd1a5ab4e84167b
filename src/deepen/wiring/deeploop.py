"""DeepLoop: DeepNorm for looped models, with constants of the unrolled depth and a norm before each branch too.

    x' = norm_after(alpha x + F(norm_before(x)))       alpha = (2 N)^p, beta = (8 N)^(-p)

    x ──┬── norm ── F ── + ── norm ── x'
        └── (x alpha) ───┘

N counts every turn of every loop at its maximum; a program that runs fewer keeps the constants. beta multiplies the
initial values of V, O and the feed-forward once (the set is DeepNorm's, R). p = 1/2 suits turns whose updates are
aligned; p = 1/4 gives the constants of DeepNorm, for turns without correlation. A fixed model has p between them.

Source: Li et al., DeepLoop, arXiv:2607.13491.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring
from deepen.wiring.branch_gain import multiply_branches


@method(
    "deeploop",
    family="wiring",
    source="arXiv:2607.13491",
    title="DeepLoop",
    mechanism="norm(alpha x + F(norm(x))), constants of the unrolled depth",
    cost="one more norm a site, no final norm; D multiply-adds a site",
)
class DeepLoop(Wiring):
    """Post-norm and branch norm with constants for loops.

    Args:
        shape: what it is built for.
        p: the exponent of both constants.
    """

    after = "af"
    final = False
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equation, both constants and the family of exponents",
        "N": "p = 1/4 gives DeepNorm's constants",
        "R": "which matrices beta multiplies; each norm has a gain of its own; no final norm",
    }

    def __init__(self, shape: Shape, *, p: Annotated[float, Field(ge=0.25, le=1)] = 0.5) -> None:
        super().__init__(shape)
        self.alpha, self.beta = (2 * shape.blocks) ** p, (8 * shape.blocks) ** -p

    def initialise(self, layers: Mapping[int, nn.Module]) -> None:
        multiply_branches(layers.values(), self.shape, self.beta)

    def constants(self) -> Mapping[str, str]:
        return {"blocks": "alpha is a power of the number of blocks"}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(self.alpha * state + y)
