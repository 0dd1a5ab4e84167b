"""Recurrent Transformer: a layer attends to keys and values made of its own outputs at earlier tokens.

    q_i, k~_i, v~_i = W n(x_i)                        of what the layer reads
    y_i = x_i + W_o attention(q_i; k_1 .. k_i-1, k~_i)          y_i += F(n(y_i))
    k_i, v_i = W_k n(y_i), W_v n(y_i)                 of what it gives, for the tokens after i

    token 1    x ── layer ─┬─ y        The temporary key and value of a token are for itself alone. Depth grows with
                   ┌───────┘           tokens: y_i depends on y_1 .. y_i-1 of the same layer.
    token 2    x ── layer ─┬─ y

Both pairs come from the same W_k and W_v after the same norm n (R). Tokens of a layer wait for each other, in training
too; queries do not, so that a layer can be run in tiles: once the first half of a stretch is done, all queries of the
second half see its keys in one product. That loads N/2 log2 N keys for N tokens instead of N(N-1)/2, is exact, and is
what `forward` does; `tiled=False` goes token by token. A cache has one slot a layer, as that of a Transformer.

The parts and weights are those of a Pre-LN stack, which it equals on a single token.

Source: The Recurrent Transformer, arXiv:2604.21215.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from deepen.registry import method
from deepen.stack.cache import Cache
from deepen.stack.shapes.tokenwise import (
    Seen,
    TokenConfig,
    attend,
    check,
    feed,
    heads,
    held,
    joined,
    merge,
)
from deepen.stack.stack import Result, Stack
from deepen.sublayers.mixer.attention import rotated


class RecurrentTransformerConfig(TokenConfig):
    """What a recurrent transformer is built from."""

    @property
    def parameters(self) -> int:
        stack = self.stack()
        queries, others = stack.heads * stack.head, 2 * (stack.kv_heads or stack.heads) * stack.head
        attention = self.width * (1 + 2 * queries + others)
        return self.width * (2 * self.vocabulary + 1) + self.layers * (attention + self.feed_forward)


class Done(NamedTuple):
    """Of a stretch of tokens: what the layer gives (B, T, D), and its keys and values (B, R, T, d)."""

    y: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@method(
    "recurrent-transformer",
    family="shape",
    source="arXiv:2604.21215",
    title="The Recurrent Transformer",
    mechanism="a layer attends to keys and values of its own outputs at earlier tokens",
    cost="no parameters; tokens of a layer run one after the other in training too; keys are projected twice",
)
class RecurrentTransformer(nn.Module):
    """A causal language model.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> config = RecurrentTransformerConfig(layers=2, width=16, heads=2)
        >>> RecurrentTransformer(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """

    def __init__(self, config: RecurrentTransformerConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.stack = Stack(config.stack(), seed)

    def new_cache(self, room: int = 64) -> Cache:
        """An empty cache with room for so many tokens; it grows by itself."""
        return Cache(self.config.layers, room)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        valid: torch.Tensor | None = None,
        last: int | None = None,
        tiled: bool = True,
    ) -> Result:
        """The logits of the next token at each position.

        Args:
            tokens: (B, T) ids; with a cache, those after the ones that it holds.
            cache: from `new_cache`; the new tokens are added to it.
            valid: no token may be padding.
            last: give logits of so many last positions only.
            tiled: whether each layer runs in tiles, or token by token.

        Raises:
            UsageError: padding, or no tokens.
        """
        check(tokens, valid)
        length, past, stack = tokens.shape[1], 0 if cache is None else cache.length, self.stack
        x = stack.embedding(tokens)
        assert stack.rotary is not None
        rotary = stack.rotary(past, length, None, x)
        for index, layer in enumerate(stack.layers):
            pass_ = LayerPass(layer, x, rotary)
            earlier = held(cache, index)
            if earlier is not None:
                pass_.seen = merge(pass_.seen, attend(pass_.q, *earlier))
            done = pass_.tiled(0, length, pass_.seen) if tiled else pass_.one_by_one()
            if cache is not None:
                cache.slot(index, True, length).update(done.k, done.v)
            x = done.y
        if cache is not None:
            cache.length += length
        x = stack.norm(x)
        return Result(stack.head(x if last is None else x[:, length - last :]), x)


class LayerPass:
    """One layer over the tokens of one pass.

    Args:
        layer: with the parts of a Pre-LN layer.
        x: (B, T, D), what it reads.
        rotary: cos and sin of the positions, each (T, 1, d).

    Attributes:
        q: (B, H, T, d), of all tokens.
        seen: what each query has seen so far; at first its own temporary key.
    """

    def __init__(self, layer: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.layer, self.attention, self.x, self.rotary = layer, layer.a.sublayer, x, rotary
        own, d = self.attention, layer.a.sublayer.head_width
        all_ = heads(own.qkv(layer.a.norm(x)), d)
        turned, v = all_.split((own.heads + own.kv_heads, own.kv_heads), dim=-2)
        q, k = rotated(turned, *rotary).split((own.heads, own.kv_heads), dim=-2)
        self.q = q.transpose(1, 2)
        groups = own.heads // own.kv_heads
        own_score = (q * k.repeat_interleave(groups, dim=2)).sum(-1, keepdim=True) * d**-0.5
        self.seen = Seen(v.repeat_interleave(groups, dim=2).transpose(1, 2), own_score.transpose(1, 2))

    def tiled(self, start: int, end: int, seen: Seen) -> Done:
        """The tokens from `start` to `end`, whose queries have seen all before `start`."""
        if end - start == 1:
            return self._token(start, seen)
        half = (end - start) // 2
        first = self.tiled(start, start + half, Seen(*(each[:, :, :half] for each in seen)))
        others = Seen(*(each[:, :, half:] for each in seen))
        others = merge(others, attend(self.q[:, :, start + half : end], first.k, first.v))
        second = self.tiled(start + half, end, others)
        return Done(torch.cat([first.y, second.y], 1), *(torch.cat(pair, 2) for pair in zip(first[1:], second[1:])))

    def one_by_one(self) -> Done:
        """All tokens, each of which loads the keys of all before it."""
        done: Done | None = None
        for place in range(self.x.shape[1]):
            seen = Seen(*(each[:, :, place : place + 1] for each in self.seen))
            if done is not None:
                seen = merge(seen, attend(self.q[:, :, place : place + 1], done.k, done.v))
            new = self._token(place, seen)
            pairs = None if done is None else zip(done[1:], new[1:])
            done = (
                new
                if done is None
                else Done(torch.cat([done.y, new.y], 1), *(torch.cat(pair, 2) for pair in pairs or ()))
            )
        assert done is not None
        return done

    def _token(self, place: int, seen: Seen) -> Done:
        """One token that has seen all before it."""
        layer, own = self.layer, self.attention
        y = self.x[:, place : place + 1] + own.out(joined(seen.y))
        y = y + feed(layer.f, y)
        rows = slice(own.heads * own.head_width, None)
        bias = None if own.qkv.bias is None else own.qkv.bias[rows]
        projected = nn.functional.linear(layer.a.norm(y), own.qkv.weight[rows], bias)
        k, v = heads(projected, own.head_width).chunk(2, dim=-2)
        cos, sin = (each[place : place + 1] for each in self.rotary)
        return Done(y, rotated(k, cos, sin).transpose(1, 2), v.transpose(1, 2))
