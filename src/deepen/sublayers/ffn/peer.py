"""PEER: thousands of experts of one neuron each, found by product keys.

    u ── W_q ── q_1 ── K_1 ── the k largest ─╮
    │       ╰── q_2 ── K_2 ── the k largest ─┴── sums ── the k largest ── experts i s + j, scores a
    ╰── y = sum over heads and their experts of softmax(a)_e gelu(u . up_e) down_e

N = s^2 experts. Each head looks for the largest of the N sums q_1 K_1[i] + q_2 K_2[j] among those of the k largest of
each half, where they must be; 2 s products take the place of N. Of these k^2 sums the one of ranks i and j counts only
where i j <= k, for as many are at least as large. Heads share the experts, and one that two heads find
counts twice. The two halves of a query are normalised, so that the size of the input does not decide how sharp the
choice is.

Source: He, Mixture of A Million Experts, arXiv:2407.04153.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Neuron, Sizes
from deepen.sublayers.ffn.retrieved import retrieved_products
from deepen.sublayers.linear import linear


class Found(NamedTuple):
    """The k experts of each head, with their scores, largest first: both (n, heads, k)."""

    scores: torch.Tensor
    experts: torch.Tensor


@method(
    "peer",
    family="ffn",
    source="arXiv:2407.04153",
    title="Mixture of A Million Experts",
    mechanism="each head finds k of s^2 single-neuron experts by the sums of two keys",
    cost="2 N D + 2 heads key_width (D + s) parameters; the products of heads k neurons, the queries and 2 s keys",
)
class PEER(FeedForward):
    """Neurons that product keys find.

    Args:
        sizes: the hidden width is the number of neurons that act on a token, heads times k.
        experts: N, a square.
        heads: searches with queries and keys of their own.
        top: k, of each head.
        key_width: of each half of a query.

    Raises:
        UsageError: N is no square or less than k, or another hidden width.
    """

    outputs: ClassVar[Mapping[str, int]] = {"down": 1}
    equals = "a feed-forward of N neurons weighed by a softmax, where a single head takes all N"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the search, shared experts, gates of one head",
        "K": "8 heads of 16 experts",
        "N": "the search finds what a search of all N finds; all N are a dense feed-forward with weights",
        "R": "halves of queries are normalised each by itself, not over the batch, which would let tokens see others",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Annotated[int, Field(ge=1)] = 4096,
        heads: Annotated[int, Field(ge=1)] = 8,
        top: Annotated[int, Field(ge=1)] = 16,
        key_width: Annotated[int, Field(ge=2)] = 64,
    ) -> None:
        super().__init__(sizes)
        side = math.isqrt(experts)
        if side**2 != experts:
            raise UsageError(
                f"peer: {experts} experts are no square; two keys find them, so take {side**2} or {(side + 1) ** 2}"
            )
        if top > experts:
            raise UsageError(f"peer: top {top} of {experts} experts; a head finds at most as many as there are")
        if sizes.hidden != heads * top:
            raise UsageError(
                f"peer: a hidden width of {sizes.hidden}, but {heads} heads of {top} experts are {heads * top} "
                "neurons; leave hidden out"
            )
        self.heads, self.top, self.side, self.key_width = heads, top, side, key_width
        self.query = nn.Linear(sizes.width, heads * 2 * key_width, bias=sizes.bias)
        self.keys = nn.Parameter(torch.empty(heads, 2, side, key_width))
        self.up = nn.Parameter(torch.empty(experts, sizes.width))
        self.down = nn.Parameter(torch.empty(experts, sizes.width))

    @classmethod
    def usual_hidden(cls, width: int, *, heads: int = 8, top: int = 16, **options: Any) -> float:
        return heads * top

    def find(self, x: torch.Tensor, context: Context) -> Found:
        """The experts of each token of x: (n, D)."""
        query = linear(self, "query", x, context).unflatten(-1, (self.heads, 2, self.key_width))
        products = torch.einsum("nhcd,hcsd->nhcs", F.layer_norm(query, (self.key_width,)), self.keys)
        each = min(self.top, self.side)
        best, places = products.topk(each, dim=-1)
        # a pair of ranks i, j counted from 1 is no larger than the i j pairs up to both
        ranks = [(i, j) for i in range(each) for j in range(each) if (i + 1) * (j + 1) <= self.top]
        i, j = torch.tensor(ranks, device=x.device).unbind(-1)
        scores, pairs = (best[:, :, 0, i] + best[:, :, 1, j]).topk(self.top, dim=-1)
        experts = places[:, :, 0, i] * self.side + places[:, :, 1, j]
        return Found(scores, experts.gather(-1, pairs))

    def forward(self, read: Read, context: Context) -> Out:
        x = read.u.flatten(0, -2)
        scores, experts = self.find(x, context)
        chosen, gates = experts.flatten(1), scores.softmax(-1).flatten(1)
        weights = F.gelu(retrieved_products(x, self.up, chosen), approximate=self.sizes.gelu) * gates
        y = F.embedding_bag(chosen, self.down, per_sample_weights=weights, mode="sum")
        return Out(y.view_as(read.u), stats={"chosen": experts})

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.up, self.down)

    def neurons(self) -> Sequence[Neuron]:
        return [Neuron((("up", (expert,)),), (("down", (expert,)),), expert) for expert in range(self.side**2)]

    def flops(self, tokens: int) -> float:
        neurons = 2 * self.heads * self.top * self.sizes.width
        return 2.0 * tokens * (self.query.weight.numel() + self.keys.numel() + neurons)

    def active(self) -> int:
        query = sum(parameter.numel() for parameter in self.query.parameters())
        return query + self.keys.numel() + 2 * self.heads * self.top * self.sizes.width
