"""The contract of a mixer.

    y = mixer(read, context)

It is built from `Heads` and its options, and tells what a pass costs. A configuration names it: `mixer: all-attention`,
or `mixer: {name: all-attention, memories: 1024}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from deepen.sublayers.contract import Context, Out, Read


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What a mixer is built from.

    Attributes:
        width: D.
        heads: H, query heads.
        kv_heads: R, a divisor of H.
        head_width: d.
        window: a query sees itself and the window - 1 tokens before it; None sees all.
        qk_norm: whether queries and keys are normalised by head.
        bias: whether the rows of queries, keys and values have a bias.
        out_bias: whether the output has one.
        eps: of the QK norm.
        causal: whether a token sees only itself and those before it.
        context: the longest input.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    out_bias: bool = False
    eps: float = 1e-6
    causal: bool = True
    context: int = 1024


class Mixer(nn.Module):
    """The base of every mixer; the map that writes to the stream is called `out`.

    Class attributes:
        equals: what it equals, and with which options; empty when that is nothing simpler.
        marks: how far each piece is backed: C in a public source, K general knowledge of the method, N an identity that
            the tests check with numbers, R reconstructed or chosen here.
    """

    equals: ClassVar[str] = ""
    marks: ClassVar[dict[str, str]] = {}

    def __init__(self, sizes: Heads) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, read: Read, context: Context) -> Out:
        raise NotImplementedError

    def reset(self) -> None:
        """Initial values of what no linear map holds; called after those of the maps."""

    def flops(self, tokens: int) -> float:
        """FLOPs of the products of one pass over a sequence of so many tokens, without those of tokens with tokens."""
        return 2.0 * tokens * sum(map_.weight.numel() for map_ in self.modules() if isinstance(map_, nn.Linear))

    @property
    def per_key(self) -> float:
        """FLOPs of one token with one other."""
        return 4.0 * self.sizes.heads * self.sizes.head_width

    @property
    def kept(self) -> int:
        """Numbers of a token that a cache keeps."""
        return 2 * self.sizes.kv_heads * self.sizes.head_width

    @property
    def kept_flops(self) -> float:
        """FLOPs of a token that make what is kept."""
        return 2.0 * self.sizes.width * self.kept
