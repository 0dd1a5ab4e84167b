"""Feedback Transformer: all layers attend to one memory a token, which merges what all layers gave there.

    m_t = sum_l softmax(w)_l x^l_t               l = 0 .. L, x^0 the embedding
    z   = x^l-1_t + W_o^l attention(W_q^l n(x^l-1_t); W_k n(m_s), W_v n(m_s), s = t - span .. t - 1)
    x^l_t = z + F^l(n(z))

    token t     x^0 ── layer ── x^1 ── layer ── x^2 ──         The lowest layer sees the highest abstraction of the
                    ╲            ╲             ╲ w_2            past. W_k and W_v are shared by all layers, so the
                     ╰─── w_0 ────┴─── w_1 ────┴── m_t          cache has one slot, whatever L is.

A token sees those before it, not itself; the first sees nothing and skips its attention (R). w begins at 0, the mean.
Norms stand before the parts and before the memory's keys, and positions are rotary (R: the paper has relative ones).

Every token needs all layers of the one before, so tokens run one after the other, in training too, and each step copies
the memory. Only where w has all its weight on the embedding is nothing waited for: `parallel` is that form.

Source: Fan et al., Addressing Some Limitations of Transformers with Feedback Memory, arXiv:2002.09402.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.cache import Cache
from deepen.stack.layer import Layer
from deepen.stack.rotary import Rotary
from deepen.stack.shapes.base import initialise, seeded
from deepen.stack.shapes.tokenwise import TokenConfig, attend, check, feed, heads, held, joined
from deepen.stack.stack import Result
from deepen.sublayers.mixer.attention import rotated
from deepen.wiring.pre_ln import PreLN

Pair = tuple[torch.Tensor, torch.Tensor]


class FeedbackTransformerConfig(TokenConfig):
    """What a feedback transformer is built from.

    Attributes:
        span: memories that a token sees; None: all.
    """

    span: int | None = Field(default=None, ge=1)

    @property
    def parameters(self) -> int:
        stack, d = self.stack(), self.width
        queries, others = stack.heads * stack.head, 2 * (stack.kv_heads or stack.heads) * stack.head
        layer = d * (1 + 2 * queries) + self.feed_forward
        memory = d * (1 + others) + self.layers + 1
        return d * (2 * self.vocabulary + 1) + self.layers * layer + memory


class FeedbackLayer(nn.Module):
    """Queries and output of an attention over the memory, and a feed-forward."""

    def __init__(self, config: FeedbackTransformerConfig) -> None:
        super().__init__()
        stack = config.stack()
        self.head_width, inside = stack.head, stack.heads * stack.head
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.query = nn.Linear(config.width, inside, bias=False)
        self.out = nn.Linear(inside, config.width, bias=False)
        self.f = Layer(stack, None, PreLN).f

    def forward(
        self, x: torch.Tensor, memory: Pair | None, rotary: Pair, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, T, D) -> (B, T, D), each token over the keys and values (B, R, S, d) that its mask (T, S) shows."""
        if memory is not None:
            q = rotated(heads(self.query(self.norm(x)), self.head_width), *rotary).transpose(1, 2)
            x = x + self.out(joined(attend(q, *memory, mask).y))
        return x + feed(self.f, x)


class Memory(nn.Module):
    """Merges the layers of a token, and makes the keys and values that all layers see."""

    def __init__(self, config: FeedbackTransformerConfig) -> None:
        super().__init__()
        stack = config.stack()
        self.head_width = stack.head
        self.weights = nn.Parameter(torch.zeros(config.layers + 1))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.kv = nn.Linear(config.width, 2 * (stack.kv_heads or stack.heads) * stack.head, bias=False)

    def merged(self, states: list[torch.Tensor]) -> torch.Tensor:
        """m: (B, T, D) of the L + 1 states of a token."""
        return torch.einsum("l,lbtd->btd", self.weights.softmax(-1), torch.stack(states))

    def pair(self, m: torch.Tensor, rotary: Pair) -> Pair:
        """Keys and values, each (B, R, T, d)."""
        k, v = heads(self.kv(self.norm(m)), self.head_width).chunk(2, dim=-2)
        return rotated(k, *rotary).transpose(1, 2), v.transpose(1, 2)


@method(
    "feedback-transformer",
    family="shape",
    source="arXiv:2002.09402",
    title="Addressing Some Limitations of Transformers with Feedback Memory",
    mechanism="all layers attend to one memory a token, the weighted sum of all layers there",
    cost="tokens run one after the other in training too; keys, values and cache of one layer instead of L",
)
class FeedbackTransformer(nn.Module):
    """A causal language model.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> config = FeedbackTransformerConfig(layers=2, width=16, heads=2)
        >>> FeedbackTransformer(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """

    def __init__(self, config: FeedbackTransformerConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            self.layers = nn.ModuleList(FeedbackLayer(config) for _ in range(config.layers))
            self.memory = Memory(config)
            self.norm = nn.RMSNorm(config.width, eps=config.eps)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            # the weights of the memory begin at 0
            for part in (self.embedding, self.layers, self.memory.norm, self.memory.kv, self.norm, self.head):
                initialise(part)
        self.rotary = Rotary(config.stack().head, config.rotary_base)

    def new_cache(self, room: int = 64) -> Cache:
        """An empty cache with room for so many tokens; it grows by itself."""
        return Cache(1, room)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        valid: torch.Tensor | None = None,
        last: int | None = None,
    ) -> Result:
        """The logits of the next token at each position, token by token.

        Args:
            tokens: (B, T) ids; with a cache, those after the ones that it holds.
            cache: from `new_cache`; the new tokens are added to it.
            valid: no token may be padding.
            last: give logits of so many last positions only.

        Raises:
            UsageError: padding, or no tokens.
        """
        check(tokens, valid)
        length, start = tokens.shape[1], 0 if cache is None else cache.length
        embedded = self.embedding(tokens)
        cos, sin = self.rotary(start, length, None, embedded)
        pair, ends = held(cache, 0), []
        for place in range(length):
            rotary = cos[place : place + 1], sin[place : place + 1]
            states = [embedded[:, place : place + 1]]
            for layer in self.layers:
                states.append(layer(states[-1], self._near(pair), rotary))
            new = self.memory.pair(self.memory.merged(states), rotary)
            pair = new if pair is None else (torch.cat([pair[0], new[0]], 2), torch.cat([pair[1], new[1]], 2))
            ends.append(states[-1])
        if cache is not None and pair is not None:
            cache.slot(0, True, length).update(pair[0][:, :, start:], pair[1][:, :, start:])
            cache.length += length
        return self._result(torch.cat(ends, dim=1), last)

    def parallel(self, tokens: torch.Tensor) -> Result:
        """The same, all tokens at once, where memories are embeddings.

        Raises:
            UsageError: a layer's output has weight in the memory, or no tokens.
        """
        check(tokens, None)
        share = float(self.memory.weights.softmax(-1)[0])
        if share != 1:
            raise UsageError(
                f"the memory holds the outputs of layers: {1 - share:.3g} of its weight; they wait for each other"
            )
        x = self.embedding(tokens)
        rotary = self.rotary(0, tokens.shape[1], None, x)
        k, v = self.memory.pair(x, rotary)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        behind = places[1:, None] - places
        mask = (behind > 0) & (behind <= (self.config.span or len(places)))
        for layer in self.layers:
            # the first token sees nothing
            others = layer(x[:, 1:], (k, v), (rotary[0][1:], rotary[1][1:]), mask)
            x = torch.cat([layer(x[:, :1], None, rotary), others], dim=1)
        return self._result(x, None)

    def _near(self, pair: Pair | None) -> Pair | None:
        """The memories that a token sees."""
        span = self.config.span
        return pair if pair is None or span is None else (pair[0][:, :, -span:], pair[1][:, :, -span:])

    def _result(self, x: torch.Tensor, last: int | None) -> Result:
        x = self.norm(x)
        return Result(self.head(x if last is None else x[:, x.shape[1] - last :]), x)
