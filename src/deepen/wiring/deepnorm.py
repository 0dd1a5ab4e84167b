"""DeepNorm: Post-LN whose stream is multiplied by alpha > 1, and whose branches begin smaller by beta < 1.

    x' = norm(alpha x + F(x))

    x ──┬── F ───────── + ── norm ── x'
        └── (x alpha) ──┘

| model of N encoder and M decoder blocks | alpha | beta |
|---|---|---|
| encoder alone | (2 N)^(1/4) | (8 N)^(-1/4) |
| decoder alone | (2 M)^(1/4) | (8 M)^(-1/4) |
| encoder beside a decoder | 0.81 (N^4 M)^(1/16) | 0.87 (N^4 M)^(-1/16) |
| decoder beside an encoder | (3 M)^(1/4) | (12 M)^(-1/4) |

beta multiplies the initial values of the rows of V, of O and of the feed-forward once; Q and K keep theirs. There it is
a Xavier gain; here it multiplies what the recipe gives (R). Blocks count every turn of a loop (R).

Source: Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, arXiv:2203.00555.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import nn

from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring
from deepen.wiring.branch_gain import multiply_branches

Side = Literal["encoder", "decoder"]


class Constants(NamedTuple):
    """What the stream is multiplied by at each site, and what branches are multiplied by at first."""

    alpha: float
    beta: float


def constants(side: Side, blocks: float, others: float = 0) -> Constants:
    """The row of the table for one side of a model, with its own blocks and those of the other side, 0 without one."""
    if not others:
        return Constants((2 * blocks) ** 0.25, (8 * blocks) ** -0.25)
    if side == "decoder":
        return Constants((3 * blocks) ** 0.25, (12 * blocks) ** -0.25)
    product = blocks**4 * others
    return Constants(0.81 * product ** (1 / 16), 0.87 * product ** (-1 / 16))


@method(
    "deepnorm",
    family="wiring",
    source="arXiv:2203.00555",
    title="DeepNet: Scaling Transformers to 1,000 Layers",
    mechanism="norm(alpha x + F(x)), constants of depth",
    cost="one norm less than Pre-LN; D multiply-adds a site",
)
class DeepNorm(Wiring):
    """Post-LN with constants that bound the change of the model in a step.

    Args:
        shape: what it is built for.
        side: which side of a model the stack is.
        others: blocks of the other side; 0 when there is none.
    """

    before = ""
    after = "af"
    final = False
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the table",
        "N": "equal to Post-LN with branches divided by alpha",
        "R": "beta multiplies the recipe's values; blocks count the turns of loops",
    }

    def __init__(self, shape: Shape, *, side: Side = "decoder", others: Annotated[int, Field(ge=0)] = 0) -> None:
        super().__init__(shape)
        self.alpha, self.beta = constants(side, shape.blocks, others)

    def initialise(self, layers: Mapping[int, nn.Module]) -> None:
        multiply_branches(layers.values(), self.shape, self.beta)

    def constants(self) -> Mapping[str, str]:
        return {"blocks": "alpha is a power of the number of blocks"}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(self.alpha * state + y)
