"""MaskBlock: a mask that the input makes multiplies the input, value by value.

    v ── W_1 ── relu ── W_2 ── mask ──╮
    h ── norm ─────────────────────── * ── W ── norm ── relu ── W_down ── y

    y = W_down relu(norm((mask(v) * norm(h)) W))       mask(v) = W_2 relu(W_1 v + b_1) + b_2, wider inside than v

As a feed-forward h and v are both what is read (R), and W_down brings the H values back to the width (R): the paper's
blocks follow each other without a residual, and its first norm is over each field of an embedded row.

Source: Wang et al., MaskNet, arXiv:2102.07619.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.linear import linear


@method(
    "mask-block",
    family="ffn",
    source="arXiv:2102.07619",
    title="MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask",
    mechanism="y = W_down relu(norm((mask(u) * norm(u)) W)), the mask of two maps of u",
    cost="two more matrices, of r D^2 each; 2 D hidden values and r = 2 cost 8 D^2 as a plain feed-forward of 4 D",
)
class MaskBlock(FeedForward):
    """A mask over the normalised input, then a map with norm and ReLU.

    Args:
        sizes: what it is built from.
        ratio: r, the width inside of the mask over D.
        fields: parts of the width that are normalised each by itself.
        eps: of the norms.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "K": "the mask, the block on embeddings and on hidden values, r = 2",
        "N": "a mask of 1 leaves a plain map with norm and ReLU; the size of the mask does not matter",
        "R": "mask and input are both what is read; the last map; one field is usual",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        ratio: Annotated[float, Field(gt=0)] = 2.0,
        fields: Annotated[int, Field(ge=1)] = 1,
        eps: Annotated[float, Field(ge=0)] = 1e-5,
    ) -> None:
        super().__init__(sizes)
        if sizes.width % fields:
            raise UsageError(f"a width of {sizes.width} has no {fields} equal fields; use a divisor of the width")
        inside = round(ratio * sizes.width)
        if inside < 1:
            raise UsageError(
                f"a ratio of {ratio:g} leaves a mask of width {sizes.width} nothing inside; use a larger one"
            )
        self.fields, self.eps = fields, eps
        self.wide = nn.Linear(sizes.width, inside)
        self.mask = nn.Linear(inside, sizes.width)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=sizes.bias)
        self.gain, self.shift_bias = nn.Parameter(torch.ones(sizes.width)), nn.Parameter(torch.zeros(sizes.width))
        self.inner_gain = nn.Parameter(torch.ones(sizes.hidden))
        self.inner_bias = nn.Parameter(torch.zeros(sizes.hidden))

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        return 2.0 * width

    def reset(self) -> None:
        super().reset()
        nn.init.ones_(self.gain)
        nn.init.ones_(self.inner_gain)
        # the mask is 1 where its matrices say nothing
        nn.init.ones_(self.mask.bias)

    def forward(self, read: Read, context: Context) -> Out:
        hidden = self.block(read.u, self.normed(read.u), context)
        return Out(linear(self, "down", hidden, context))

    def normed(self, v: torch.Tensor) -> torch.Tensor:
        """Each field normalised: (..., D) -> (..., D)."""
        fields = v.unflatten(-1, (self.fields, -1))
        return F.layer_norm(fields, fields.shape[-1:], eps=self.eps).flatten(-2) * self.gain + self.shift_bias

    def block(self, v: torch.Tensor, h: torch.Tensor, context: Context) -> torch.Tensor:
        """relu(norm((mask(v) * h) W)): v and h (..., D) -> (..., H)."""
        mask = linear(self, "mask", F.relu(linear(self, "wide", v, context)), context)
        mapped = linear(self, "up", mask * h, context)
        return F.relu(F.layer_norm(mapped, mapped.shape[-1:], self.inner_gain, self.inner_bias, self.eps))

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.up.weight, self.down.weight)
