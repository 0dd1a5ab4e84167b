"""The ultra-fast feed-forward: a tree without leaves, whose nodes are neurons that decide and write.

    node 0 ──┬ right ── node 2 ──┬ ...       z_j = w_j u + b_j      right where z_j > 0, else left
             ╰ left ─── node 1 ──┴ ...       y = sum over the nodes on the way of gelu(z_j) v_j

A token passes one node a level, so of the 2^d - 1 neurons of a tree d act on it, in training as in evaluation. Several
trees walk side by side and add up. The decision has no gradient: a neuron learns from the tokens that pass it.

Source: Belcak and Wattenhofer, Exponentially Faster Language Modelling, arXiv:2311.10770.
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
from deepen.sublayers.ffn.retrieved import retrieved_products


@method(
    "ultra-fast-feed-forward",
    family="ffn",
    source="arXiv:2311.10770",
    title="Exponentially Faster Language Modelling",
    mechanism="the neurons are the nodes of binary trees; a token runs those on its way down, one a level",
    cost="2 trees (2^d - 1) D parameters; the products of trees d neurons",
)
class UltraFast(FeedForward):
    """Trees of neurons.

    Args:
        sizes: the hidden width is the number of neurons that act on a token, trees times depth.
        depth: d, levels of a tree.
        trees: how many of them.

    Raises:
        UsageError: another hidden width.
    """

    outputs: ClassVar[Mapping[str, int]] = {"down": 1}
    equals: ClassVar[str] = "a GELU feed-forward of as many neurons as there are trees, with depth 1"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "nodes that are neurons, the walk, no output biases, trees that add up; 4,095 neurons of which 12 act",
        "N": "the walk is a loop over levels; depth 1 is the dense feed-forward",
        "R": "initial values of the recipe",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        depth: Annotated[int, Field(ge=1, le=20)] = 8,
        trees: Annotated[int, Field(ge=1)] = 1,
    ) -> None:
        super().__init__(sizes)
        if sizes.hidden != trees * depth:
            raise UsageError(
                f"ultra-fast-feed-forward: a hidden width of {sizes.hidden}, but {trees} trees of depth {depth} are "
                f"{trees * depth} neurons that act on a token; leave hidden out"
            )
        self.depth, self.trees, self.nodes = depth, trees, 2**depth - 1
        self.up = nn.Parameter(torch.empty(trees * self.nodes, sizes.width))
        self.down = nn.Parameter(torch.empty(trees * self.nodes, sizes.width))
        self.up_bias = nn.Parameter(torch.empty(trees * self.nodes)) if sizes.bias else None

    @classmethod
    def usual_hidden(cls, width: int, *, depth: int = 8, trees: int = 1, **options: Any) -> float:
        return trees * depth

    def walk(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nodes on the way of each token and their z, both (n, depth trees), of x: (n, D)."""
        first = torch.arange(self.trees, device=x.device) * self.nodes
        at = torch.zeros(len(x), self.trees, dtype=torch.long, device=x.device)
        nodes, values = [], []
        for _ in range(self.depth):
            node = at + first
            z = retrieved_products(x, self.up, node)
            if self.up_bias is not None:
                z = z + self.up_bias[node]
            nodes.append(node)
            values.append(z)
            at = 2 * at + 1 + (z > 0)
        return torch.cat(nodes, 1), torch.cat(values, 1)

    def forward(self, read: Read, context: Context) -> Out:
        nodes, z = self.walk(read.u.flatten(0, -2))
        weights = F.gelu(z, approximate=self.sizes.gelu)
        y = F.embedding_bag(nodes, self.down, per_sample_weights=weights, mode="sum")
        return Out(y.view_as(read.u), stats={"nodes": nodes})

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.up, self.down)

    def flops(self, tokens: int) -> float:
        return 2.0 * tokens * 2 * self.depth * self.trees * self.sizes.width

    def active(self) -> int:
        return self.depth * self.trees * (2 * self.sizes.width + (self.up_bias is not None))
