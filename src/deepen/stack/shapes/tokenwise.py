"""What models share whose tokens wait for those before them: sizes, attention in pieces, one feed-forward at a time.

    attend(q, k, v)         softmax(q k^T / sqrt(d)) v, and the logarithm of the sum that it was divided by
    merge(one, other)       the same over the keys of both

Attention over keys that come in pieces is exact: each piece gives its result and its sum, and two results are weighed
by their sums. Sums are kept in single precision at least.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, ValidationError, model_validator

from deepen.errors import UsageError
from deepen.program import Key
from deepen.program.site import Site
from deepen.stack.cache import Cache
from deepen.stack.config import StackConfig
from deepen.stack.shapes.base import ShapeConfig
from deepen.sublayers.contract import Context, Read
from deepen.wiring.base import wide


class TokenConfig(ShapeConfig):
    """What a causal language model of this kind is built from.

    Attributes:
        layers: L.
        width: D.
        heads: query heads.
        kv_heads: heads of keys and values; None: as many as query heads.
        hidden: hidden width of the feed-forward, a SwiGLU; None: 8/3 of the width.
        vocabulary: number of token ids.
        rotary_base: of rotary positions.
        eps: of the norms.
    """

    causal: ClassVar[bool] = True

    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    hidden: int | None = Field(default=None, ge=1)
    vocabulary: int = Field(default=256, ge=1)
    rotary_base: float = Field(default=10000.0, gt=0)
    eps: float = Field(default=1e-5, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            self.stack()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    def stack(self) -> StackConfig:
        """The Pre-LN stack of the same sizes; its head is its own, so that a file holds each tensor once."""
        names = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "rotary_base", "eps")
        return StackConfig(tied=False, **{name: getattr(self, name) for name in names})

    @property
    def feed_forward(self) -> int:
        """Parameters of a feed-forward with its norm."""
        return (3 * self.stack().inner + 1) * self.width


class Seen(NamedTuple):
    """What queries have seen: the result y: (B, H, T, d), and the logarithm of the sum of its softmax: (B, H, T, 1)."""

    y: torch.Tensor
    sum: torch.Tensor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Seen:
    """Attention of q: (B, H, T, d) over k, v: (B, R, S, d); `mask`, (T, S), is True where a key is seen."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = wide(q @ k.mT) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    return Seen((scores - sums).exp().to(v.dtype) @ v, sums)


def merge(one: Seen, other: Seen) -> Seen:
    """What queries see that see the keys of both."""
    sums = torch.logaddexp(one.sum, other.sum)
    shares = ((each.sum - sums).exp().to(each.y.dtype) for each in (one, other))
    return Seen(one.y * next(shares) + other.y * next(shares), sums)


def heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """(B, T, H d) -> (B, T, H, d)."""
    return x.unflatten(-1, (-1, width))


def joined(y: torch.Tensor) -> torch.Tensor:
    """(B, H, T, d) -> (B, T, H d)."""
    return y.transpose(1, 2).flatten(2)


def feed(part: Any, x: torch.Tensor) -> torch.Tensor:
    """The output (B, T, D) of the feed-forward part of a layer; it needs no other tokens."""
    site = Site(visit=0, key=Key(0), part="f", index=0, total=1, turn=())
    return part(Read(x), Context(site, None, lambda window: (None, False), None, {}, None)).y


def held(cache: Cache | None, slot: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The keys and values of the tokens that a cache holds, each (B, R, S, d); None where it holds none."""
    if cache is None or not cache.length:
        return None
    keys, values = cache.keys[slot], cache.values[slot]
    assert keys is not None
    assert values is not None
    return keys[:, :, : cache.length], values[:, :, : cache.length]


def check(tokens: torch.Tensor, valid: torch.Tensor | None) -> None:
    """Refuses what cannot run token by token.

    Raises:
        UsageError: no tokens, or some token is padding.
    """
    if not tokens.shape[1]:
        raise UsageError("the input is empty; give at least one token")
    if valid is not None and not bool(valid.all()):
        raise UsageError("a model whose tokens wait for each other takes no padding; give sequences of one length")
