"""A binary tree of decisions: which of 2^d leaves a token goes to.

    node 0 ──┬ right ── node 2 ──┬ right ── leaf 3
             │                   ╰ left ─── leaf 2
             ╰ left ─── node 1 ──┬ right ── leaf 1
                                 ╰ left ─── leaf 0

Node j decides by z_j = w_j x + b_j, its children are 2 j + 1 on the left and 2 j + 2 on the right. Hard: right where
z_j >= 0. Soft: right with the chance c_j = sigmoid(z_j / tau), so that a leaf has the product of those on its path.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# Nodes of so many levels are one product; below them only those on a token's path are read.
TOGETHER = 8


class Tree(nn.Module):
    """The nodes of a tree.

    Args:
        depth: d; 0 has one leaf and no node.
        width: D.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        self.weight = nn.Parameter(torch.empty(self.leaves - 1, width))
        self.bias = nn.Parameter(torch.empty(self.leaves - 1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logit z of every node: (n, D) -> (n, 2^d - 1)."""
        return F.linear(x, self.weight, self.bias)

    def shares(self, right: torch.Tensor) -> torch.Tensor:
        """The chance of each leaf, (n, 2^d), of the chances to go right, (n, 2^d - 1)."""
        shares = right.new_ones(len(right), 1)
        for level in range(self.depth):
            own = right[:, 2**level - 1 : 2 ** (level + 1) - 1]
            shares = torch.stack([shares * (1 - own), shares * own], dim=-1).flatten(1)
        return shares

    def taken(self, logits: torch.Tensor) -> torch.Tensor:
        """The leaf that each token reaches, (n,), of z of the nodes of the top levels or of all."""
        steps = (logits >= 0).long() + 1
        at = steps.new_zeros(len(steps), 1)
        for _ in range((steps.shape[1] + 1).bit_length() - 1):
            at = torch.add(steps.gather(1, at), at, alpha=2)
        return at.squeeze(1) - steps.shape[1]

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        """The same from x: (n, D), reading d nodes a token and those of the top levels."""
        top = 2 ** min(self.depth, TOGETHER) - 1
        at = self.taken(F.linear(x, self.weight[:top], self.bias[:top])) + top
        rows = x.unsqueeze(2)
        for _ in range(self.depth - TOGETHER):
            z = torch.bmm(self.weight[at].unsqueeze(1), rows).flatten() + self.bias[at]
            at = torch.add((z >= 0) + 1, at, alpha=2)
        return at - (self.leaves - 1)

    def read(self) -> int:
        """How many nodes `leaf` multiplies with a token."""
        return 2 ** min(self.depth, TOGETHER) - 1 + max(0, self.depth - TOGETHER)
