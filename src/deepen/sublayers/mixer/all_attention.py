"""All-attention: learned keys and values that every query sees beside those of the sequence, in one softmax.

    u ──┬── W_q ── q ──────────────┬── q . k_t  of the tokens ──╮
        ├── W_k ── k_t             ╰── q . M_k  of the memory ── softmax over both ── weights
        ╰── W_v ── v_t ; M_v ─────────────────────────────────── * ── sum ── W_o ── y

    M_k = sqrt(d) memory_keys, M_v = sqrt(N) memory_values: both begin with values of deviation 1

N pairs a head are what a feed-forward of N hidden values would hold: softmax(q M_k^T / sqrt(d)) M_v alone is one, with
softmax as its activation. So the layer needs no other, and a program visits its part alone: `(0-11).a`. Positions are
those of tokens: a query meets the memory as it was before its rotation, and no mask hides a pair. Heads that share keys
and values share their pairs (R).

Source: Sukhbaatar et al., Augmenting Self-attention with Persistent Memory, arXiv:1907.01470.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Beside, Context, Read
from deepen.sublayers.mixer.attention import Attention
from deepen.sublayers.mixer.base import Heads


@method(
    "all-attention",
    family="mixer",
    source="arXiv:1907.01470",
    title="Augmenting Self-attention with Persistent Memory",
    mechanism="attention over the tokens and N learned pairs of key and value a head, in one softmax",
    cost="2 N D parameters and products a token, as a feed-forward of N hidden values, which it replaces",
)
class AllAttention(Attention):
    """Attention with a memory.

    Args:
        sizes: what it is built from.
        memories: N, pairs a head; 0 is attention.
        scale: of the products; None is 1 / sqrt(d).
    """

    equals: ClassVar[str] = "attention with no memories"
    marks: ClassVar[dict[str, str]] = {
        "K": "one softmax, the scaling of keys and values, positions on tokens alone, N of 1024 to 2048",
        "N": "without memories it is attention; without tokens a feed-forward with softmax; the order of pairs is free",
        "R": "heads that share keys and values share pairs",
    }

    def __init__(
        self, sizes: Heads, *, memories: Annotated[int, Field(ge=0)] = 1024, scale: float | None = None
    ) -> None:
        super().__init__(sizes, scale=scale)
        self.memories = memories
        self.memory_keys = nn.Parameter(torch.empty(sizes.kv_heads, memories, sizes.head_width))
        self.memory_values = nn.Parameter(torch.empty(sizes.kv_heads, memories, sizes.head_width))

    def reset(self) -> None:
        nn.init.normal_(self.memory_keys, std=self.head_width**-0.5)
        nn.init.normal_(self.memory_values, std=max(1, self.memories) ** -0.5)

    def flops(self, tokens: int) -> float:
        return super().flops(tokens) + tokens * self.per_key * self.memories

    def _turned(self, read: Read, context: Context, writes: bool) -> bool:
        return False

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, causal: bool, straight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        batch, length, _, d = q.shape
        scale = d**-0.5 if self.scale is None else self.scale
        # the queries that share keys have an axis of their own: (B, T, R, G, d)
        shared = (batch, length, self.kv_heads, self.heads // self.kv_heads, d)
        scores = torch.einsum("btrgd,brsd->btrgs", q.reshape(shared), k) * scale
        if causal:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0, :, None, None], -torch.inf)
        keys, values = d**0.5 * self.memory_keys, self.memories**0.5 * self.memory_values
        of_memory = torch.einsum("btrgd,rnd->btrgn", straight.reshape(shared), keys) * scale
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.cat([scores, of_memory], dim=-1).softmax(-1, dtype=wide).to(q.dtype)
        tokens, memory = weights.split((k.shape[2], self.memories), dim=-1)
        y = torch.einsum("btrgs,brsd->btrgd", tokens, v) + torch.einsum("btrgn,rnd->btrgd", memory, values)
        return y.reshape(batch, length, -1)

    def _with_beside(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, causal: bool, straight: torch.Tensor, beside: Beside,
    ) -> torch.Tensor:  # fmt: skip
        raise UsageError(
            "the mixer all-attention has keys beside those of the sequence already; the wiring brings others: use "
            "softmax-attention with this wiring, or another wiring"
        )
