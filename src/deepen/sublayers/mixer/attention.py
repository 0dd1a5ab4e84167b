"""Softmax attention with grouped queries.

    q = W_q u   k = W_k u   v = W_v u       [QK norm]  [rotary positions]
    y = W_o softmax(q k^T / sqrt(d) + mask) v

One matrix holds the rows of queries, keys and values, so that one product computes them. H query heads share R <= H
heads of keys and values: Ainslie et al., arXiv:2305.13245. Rotary positions turn the pair (i, i + d/2) of each head: Su
et al., arXiv:2104.09864. QK norm: an RMS norm over each head's width before the rotation, Henry et al.,
arXiv:2010.04245.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.sublayers.contract import Beside, Context, Out, Read
from deepen.sublayers.linear import linear
from deepen.sublayers.mixer.base import Heads, Mixer


@method(
    "softmax-attention",
    family="mixer",
    source="arXiv:1706.03762",
    title="Attention Is All You Need",
    mechanism="y = W_o softmax(q k^T / sqrt(d) + mask) v, by heads that may share keys and values",
    cost="4 D^2 of maps, and 2 D of each token with each other",
)
class Attention(Mixer):
    """Attention with H query heads and R heads of keys and values.

    Args:
        sizes: what it is built from.
        scale: of the products; None is 1 / sqrt(d).
    """

    def __init__(self, sizes: Heads, *, scale: float | None = None) -> None:
        super().__init__(sizes)
        heads, kv_heads, head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.window, self.scale = sizes.window, scale
        self.qkv = nn.Linear(sizes.width, (heads + 2 * kv_heads) * head_width, bias=sizes.bias)
        self.out = nn.Linear(heads * head_width, sizes.width, bias=sizes.out_bias)
        self.q_norm = nn.RMSNorm(head_width, eps=sizes.eps) if sizes.qk_norm else None
        self.k_norm = nn.RMSNorm(head_width, eps=sizes.eps) if sizes.qk_norm else None

    def forward(self, read: Read, context: Context) -> Out:
        slot = context.slot
        writes = slot is None or slot.writes
        turned = self._turned(read, context, writes)
        q, k, v = self._project(read, context, writes, turned)
        if context.on_keys is not None:
            q, k, v = context.on_keys(q, k, v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k) if writes else k
        straight = q
        if context.rotary is not None and not turned:
            q = rotated(q, *context.rotary)
            k = rotated(k, *context.rotary) if writes else k
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if slot is not None:
            k, v = slot.update(k, v) if writes else slot.read()
        mask, causal = context.masks(self.window)
        if context.beside is not None:
            y = self._with_beside(q, k, v, mask, causal, straight, context.beside)
            return Out(linear(self, "out", y, context))
        return Out(linear(self, "out", self._attended(q, k, v, mask, causal, straight), context))

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, causal: bool, straight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Values by heads, (B, T, H d): q (B, T, H, d), k and v (B, R, S, d); `straight` is q before the rotation."""
        batch, length = q.shape[:2]
        groups = self.heads // self.kv_heads
        if length == 1 and groups > 1:
            # The queries that share keys stand where tokens would: no key is repeated.
            q = q.view(batch, self.kv_heads, groups, self.head_width)
        else:
            q = q.transpose(1, 2)
            if groups > 1:
                k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        return y.reshape(batch, 1, -1) if length == 1 else y.transpose(1, 2).reshape(batch, length, -1)

    def _turned(self, read: Read, context: Context, writes: bool) -> bool:
        """Whether nothing comes between projection and rotation, so that one rotation turns queries and keys."""
        plain = self.q_norm is None and context.on_keys is None and read.k is None and read.v is None
        plain = plain and context.beside is None
        return plain and writes and context.rotary is not None

    def _project(
        self, read: Read, context: Context, writes: bool, turned: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, T, H, d), keys and values (B, T, R, d), rotated where `turned`; or queries alone."""
        d, h, r = self.head_width, self.heads, self.kv_heads
        if not writes:
            q = linear(self, "qkv", read.u, context, slice(h * d)).unflatten(-1, (h, d))
            return q, q[..., :0, :], q[..., :0, :]
        if read.k is None and read.v is None:
            heads = linear(self, "qkv", read.u, context).unflatten(-1, (h + 2 * r, d))
            if turned and context.rotary is not None:
                heads, v = heads.split((h + r, r), dim=-2)
                q, k = rotated(heads, *context.rotary).split((h, r), dim=-2)
                return q, k, v
            q, k, v = heads.split((h, r, r), dim=-2)
            return q, k, v
        inputs = (read.u, read.u if read.k is None else read.k, read.u if read.v is None else read.v)
        rows = (slice(h * d), slice(h * d, (h + r) * d), slice((h + r) * d, None))
        q, k, v = (
            linear(self, "qkv", x, context, own).unflatten(-1, (-1, d)) for x, own in zip(inputs, rows, strict=True)
        )
        return q, k, v

    def _with_beside(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: torch.Tensor | None, causal: bool, straight: torch.Tensor, beside: Beside,
    ) -> torch.Tensor:  # fmt: skip
        """One softmax over the keys of the sequence and those that each token has of its own: (B, T, H d).

        Args:
            q: (B, T, H, d), rotated; `straight` is q before the rotation.
            k: (B, R, S, d), like v.
        """
        batch, length, _, d = q.shape
        scale = d**-0.5 if self.scale is None else self.scale
        # the queries that share a head of keys get an axis of their own: (B, T, R, G, d)
        shared = (batch, length, self.kv_heads, self.heads // self.kv_heads, d)
        scores = torch.einsum("btrgd,brsd->btrgs", q.reshape(shared), k) * scale
        if causal:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0, :, None, None], -torch.inf)
        own = (q if beside.rotary else straight).reshape(shared)
        keys = beside.keys if self.k_norm is None else tuple(self.k_norm(key) for key in beside.keys)
        # source by source, so that no copy of all of them is made
        logits = [(own * key.unsqueeze(3)).sum(-1) * scale for key in keys]
        wide = torch.promote_types(q.dtype, torch.float32)
        shares = torch.cat([scores, torch.stack(logits, dim=-1)], dim=-1).softmax(-1, dtype=wide).to(q.dtype)
        of_sequence, of_token = shares.split((k.shape[2], len(keys)), dim=-1)
        y = torch.einsum("btrgs,brsd->btrgd", of_sequence, v)
        for share, value in zip(of_token.unsqueeze(-2).unbind(-1), beside.values, strict=True):
            y = y + share * value.unsqueeze(3)
        return y.reshape(batch, length, -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x: (B, T, heads, d); `sin` has the sign of the first half already."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
