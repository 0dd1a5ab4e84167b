"""A projection head: maps in a row, each with a skip, that first widen and then narrow; or a gate in their place.

    u ──┬── W_1 ── f ── + ──┬── W_2 ── + ── y        S: the identity where widths agree at first, a map otherwise
        ╰── S_1 ────────╯   ╰── S_2 ───╯

    gated:   u ── f(W_gate u) * W_value u ── W_2 ── y

As a feed-forward it ends at the width of the stream, H = 2 D inside (R). As a head, `ProjectionHead`, it maps token
states to vectors of unit length whose late interaction ranks documents: the sum over the query's tokens of the largest
product with a token of the document. Without an activation and without a gate all of it is one linear map: only
training differs, and `fold` gives that map.

Source: Clavie et al., Simple Projection Variants Improve ColBERT Performance, arXiv:2510.12327.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.linear import linear

Activation = Literal["identity", "relu", "silu", "gelu"]
ACTIVATIONS: Mapping[str, Any] = {"identity": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}


class Maps(FeedForward):
    """Two maps with skips, or a gate and a map, that end at the width `output`."""

    outputs: ClassVar[Mapping[str, int]] = {"down.weight": 0, "down.bias": 0, "skip_down.weight": 0}

    def __init__(self, sizes: Sizes, output: int, activation: Activation, gated: bool, skip: bool) -> None:
        super().__init__(sizes)
        self.activation: Activation = activation
        self.gated, self.skips = gated, skip and not gated
        self.up = nn.Linear(sizes.width, 2 * sizes.hidden if gated else sizes.hidden, bias=sizes.bias)
        self.down = nn.Linear(sizes.hidden, output, bias=sizes.bias)
        if self.skips:
            same = sizes.width == sizes.hidden
            self.skip_up = nn.Identity() if same else nn.Linear(sizes.width, sizes.hidden, bias=False)
            self.skip_down = nn.Linear(sizes.hidden, output, bias=False)

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        return 2.0 * width

    def forward(self, read: Read, context: Context) -> Out:
        return Out(self.mapped(read.u, context))

    def mapped(self, u: torch.Tensor, context: Context) -> torch.Tensor:
        """(..., D) -> (..., output)."""
        f, up = ACTIVATIONS[self.activation], linear(self, "up", u, context)
        if self.gated:
            gate, value = up.chunk(2, dim=-1)
            return linear(self, "down", f(gate) * value, context)
        if not self.skips:
            return linear(self, "down", f(up), context)
        hidden = f(up) + linear(self, "skip_up", u, context)
        return linear(self, "down", hidden, context) + linear(self, "skip_down", hidden, context)

    def fold(self) -> nn.Linear:
        """The one map that it is.

        Raises:
            UsageError: an activation or a gate, which no linear map has.
        """
        if self.gated or self.activation != "identity":
            what = "a gate" if self.gated else f"the activation {self.activation}"
            raise UsageError(f"a projection with {what} is no linear map; only the identity without a gate folds")
        device, dtype = self.up.weight.device, self.up.weight.dtype
        made = nn.Linear(self.sizes.width, self.down.out_features, bias=self.sizes.bias, device=device, dtype=dtype)
        with torch.no_grad():
            first, second = (self._folded(name) for name in ("up", "down"))
            made.weight.copy_(second @ first)
            if self.up.bias is not None and self.down.bias is not None:
                made.bias.copy_(second @ self.up.bias + self.down.bias)
        return made

    def _folded(self, name: Literal["up", "down"]) -> torch.Tensor:
        """A map with its skip, (out, in)."""
        weight: torch.Tensor = self.get_parameter(f"{name}.weight")
        if not self.skips:
            return weight
        skip = self._modules[f"skip_{name}"]
        square = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return weight + (skip.weight if isinstance(skip, nn.Linear) else square)


@method(
    "projection",
    family="ffn",
    source="arXiv:2510.12327",
    title="Simple Projection Variants Improve ColBERT Performance",
    mechanism="y = W_2 h + S_2 h, h = f(W_1 u) + S_1 u; or h = f(W_gate u) * W_value u",
    cost="2 D H of the maps and 2 D H of the skips; a gate instead D H more and no skip",
)
class Projection(Maps):
    """A projection back to the width of the stream.

    Args:
        sizes: what it is built from.
        activation: f.
        gated: whether a gate takes the place of the first map and both skips.
        skip: whether maps have skips.
    """

    equals: ClassVar[str] = "one linear map with the identity as activation and no gate"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "a dense layer with an activation and a skip that is a map where widths differ",
        "N": "without an activation it folds into one matrix, with and without skips",
        "R": "the form as a feed-forward; two maps; a gate without skips; the last skip is always a map",
    }

    def __init__(
        self, sizes: Sizes, *, activation: Activation = "identity", gated: bool = False, skip: bool = True
    ) -> None:
        super().__init__(sizes, sizes.width, activation, gated, skip)


class ProjectionHead(Maps):
    """Token states to vectors of unit length.

    Args:
        width: D.
        output: the width of the vectors.
        hidden: H; None: 2 D.
        activation: f.
        gated: whether a gate takes the place of the first map and both skips.
        skip: whether maps have skips.
        bias: whether the maps have one.
    """

    def __init__(
        self,
        width: int,
        output: int = 128,
        *,
        hidden: int | None = None,
        activation: Activation = "identity",
        gated: bool = False,
        skip: bool = True,
        bias: bool = False,
    ) -> None:
        if min(width, output) < 1:
            raise UsageError(f"a head maps 1 value or more to 1 or more, got {width} to {output}")
        super().__init__(Sizes(width=width, hidden=hidden or 2 * width, bias=bias), output, activation, gated, skip)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B, T, D) -> (B, T, output), each of length 1."""
        nowhere: Any = None
        return F.normalize(self.mapped(stream, Context(nowhere, None, nowhere, None, {}, None)), dim=-1)


def late_interaction(queries: torch.Tensor, documents: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Scores (Q, N) of queries (Q, S, d) and documents (N, T, d): sum over s of the largest product over t.

    `valid`: (N, T), which tokens of documents are no padding.
    """
    products = torch.einsum("qsd,ntd->qnst", queries, documents)
    if valid is not None:
        products = products.masked_fill(~valid[None, :, None], -torch.inf)
    return products.amax(-1).sum(-1)
