"""Hash layers: a fixed table sends each token id to its expert; nothing is learned about where, and no loss is needed.

    token id ── table ── e
                         │
    u ──────────── expert e ── y        y = sum over the hashes m of expert h_m(id) (u), each of width H / hashes

The id is that of the position's input, so a token has the same expert in every context, layer and turn. Several hash
functions have experts of their own: the columns of the first map and the rows of the second are put together from one
block each. The table lies in the checkpoint; `balance` makes one from the counts of ids in a text.

Source: Roller et al., Hash Layers For Large Sparse Models, arXiv:2106.04426.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Neuron, Sizes
from deepen.sublayers.ffn.experts import Experts
from deepen.sublayers.ffn.forms import FORMS, Name


@method(
    "hash-layer",
    family="ffn",
    source="arXiv:2106.04426",
    title="Hash Layers For Large Sparse Models",
    mechanism="a fixed table sends each token id to one of E feed-forwards",
    cost="the parameters of E feed-forwards; the products of one",
)
class HashLayer(FeedForward):
    """Experts behind a table of token ids.

    Args:
        sizes: the hidden width is that of all that a token passes through.
        experts: E, of each hash function.
        hashes: hash functions.
        form: of each expert.
        seed: of the table that a new model begins with.

    Raises:
        UsageError: a hidden width that the hash functions cannot share evenly.
    """

    outputs: ClassVar[Mapping[str, int]] = {"experts.down": 1, "experts.down_bias": 1}
    equals = "the feed-forward of its form where `experts` is 1, with any number of hashes"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "routing by id, the balanced table, several hash functions",
        "N": "one expert is the dense feed-forward; the expert of an id is the same in every context",
        "R": "a new table is a random one with equally many ids for each expert, the same in all layers",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Annotated[int, Field(ge=1)] = 8,
        hashes: Annotated[int, Field(ge=1)] = 1,
        form: Name = "relu",
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        super().__init__(sizes)
        if sizes.hidden % hashes:
            raise UsageError(
                f"hash-layer: a hidden width of {sizes.hidden} for {hashes} hashes; each has an equal part of it, so "
                "give hidden a multiple of hashes"
            )
        self.each, self.hashes, self.seed = experts, hashes, seed
        self.experts = Experts(experts * hashes, sizes, sizes.hidden // hashes, form)
        self.table: torch.Tensor
        self.register_buffer("table", torch.empty(hashes, sizes.vocabulary, dtype=torch.long))
        self.reset()

    @classmethod
    def usual_hidden(cls, width: int, *, form: Name = "relu", **options: Any) -> float:
        return FORMS[form].times * width

    def reset(self) -> None:
        super().reset()
        drawn = torch.Generator().manual_seed(self.seed)
        for row in self.table:
            row.copy_(torch.randperm(len(row), generator=drawn, device="cpu") % self.each)

    def balance(self, counts: Sequence[int] | torch.Tensor) -> None:
        """Makes the table from how often each id occurs, so that experts get about equally many tokens.

        Raises:
            UsageError: counts of another number of ids, or several hash functions, which would all become the same.
        """
        vocabulary = self.sizes.vocabulary
        if len(counts) != vocabulary or self.hashes > 1:
            got = f"{self.hashes} hashes" if self.hashes > 1 else f"counts of {len(counts)} ids"
            raise UsageError(f"hash-layer: one hash and a count for each of {vocabulary} ids are balanced; got {got}")
        self.table[0].copy_(torch.tensor(balanced([int(count) for count in counts], self.each)))

    def forward(self, read: Read, context: Context) -> Out:
        """Each token through its experts.

        Raises:
            UsageError: the input has no token ids.
        """
        ids = context.tokens
        if ids is None or ids.is_floating_point() or ids.shape != read.u.shape[:-1]:
            got = "none" if ids is None else f"{ids.dtype} of the shape {tuple(ids.shape)}"
            raise UsageError(
                f"hash-layer: it needs a token id for each of {tuple(read.u.shape[:-1])} positions, got {got}; "
                "use moe where the input has no ids"
            )
        x = read.u.flatten(0, -2)
        chosen = self.table[:, ids.flatten()].T
        chosen = chosen + self.each * torch.arange(self.hashes, device=chosen.device)
        return Out(self.experts(x, chosen).view_as(read.u))

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.experts.up, self.experts.down)

    def neurons(self) -> Sequence[Neuron]:
        return list(self.experts.neurons())

    def flops(self, tokens: int) -> float:
        return tokens * self.hashes * self.experts.flops

    def active(self) -> int:
        return self.hashes * self.experts.size


def balanced(counts: Sequence[int], experts: int) -> list[int]:
    """The expert of each id: from the most frequent on, an id goes where the fewest tokens are so far."""
    room = [(0, 0, expert) for expert in range(experts)]
    table = [0] * len(counts)
    for token in sorted(range(len(counts)), key=lambda each: -counts[each]):
        tokens, ids, expert = heapq.heappop(room)
        table[token] = expert
        heapq.heappush(room, (tokens + counts[token], ids + 1, expert))
    return table
