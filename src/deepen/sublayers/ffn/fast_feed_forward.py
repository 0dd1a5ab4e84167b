"""The fast feed-forward: a tree of decisions over small feed-forwards, of which a trained one runs one a token.

    u ──┬── tree ── p ─────────────────────────╮       p_l: the chance of leaf l, products of c and 1 - c
        ╰── W_up,l ── relu ── W_down,l ── y_l ── * ── sum over l ── y

    soft   y = sum over l of p_l y_l                   c = sigmoid((w u + b) / tau) at each node
    hard   y = y_l of the leaf where the tree ends     right where w u + b >= 0

Training is soft, and draws the nodes to decisions by two means: the hardening loss, h times the mean entropy of c, and
the temperature tau, which falls from 1 to its last value on a geometric line over `anneal` steps. In evaluation a token
reads d nodes and one leaf. The hidden width is that of one leaf, w; all leaves together have 2^d w, the training width.

Hard inference runs in one of three ways, whichever should take the least time for so many tokens: the matrices of each
token's leaf are gathered; tokens are sorted by leaf and each leaf is one product; or all leaves run and one counts,
which is what a small dense feed-forward costs.

Source: Belcak and Wattenhofer, Fast Feedforward Networks, arXiv:2308.14711.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Neuron, Sizes
from deepen.sublayers.ffn.grouped import grouped_linear
from deepen.sublayers.ffn.tree import Tree

Way = Literal["gathered", "grouped", "all"]
# Microseconds on one core, of which only the ratios matter: a number copied from a matrix, or read from one; a
# multiplication and addition of a product; a product over one group; a leaf that is looked at; sorting.
COPY, LOAD, PRODUCT, GROUP, LOOK, SORT = 2.2e-3, 5e-4, 1.4e-4, 25.0, 0.1, 400.0


@method(
    "fast-feed-forward",
    family="ffn",
    source="arXiv:2308.14711",
    title="Fast Feedforward Networks",
    mechanism="a binary tree chooses one of 2^d small ReLU feed-forwards; soft in training, hard in evaluation",
    cost="training that of all leaves; a token of hard inference d nodes and one leaf",
)
class FastFeedForward(FeedForward):
    """A tree over leaves.

    Args:
        sizes: with the width of one leaf as hidden width.
        depth: d, for 2^d leaves.
        inference: what evaluation computes; training is always soft.
        hardening: h, the coefficient of the hardening loss.
        temperature: tau at the end of `anneal`.
        anneal: steps over which tau falls from 1; 0: it has its last value from the start.
        leak: the chance that a node's decision is turned around, for each token, in training.
    """

    outputs: ClassVar[Mapping[str, int]] = {"down": 2, "down_bias": 1}
    equals: ClassVar[str] = "a plain ReLU feed-forward with depth 0"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the tree, soft and hard, the entropy of the hardening loss, the leak",
        "K": "h = 3, and that a mean entropy below 0.10 is safe to harden",
        "N": "shares of leaves sum to 1; soft becomes hard as logits grow; equal leaves give that leaf by any way; "
        "hard is a loop over tokens; depth 0 is the plain feed-forward",
        "R": "the entropy is a mean over nodes where the paper sums; the temperature; initial values of the recipe",
    }

    step: torch.Tensor

    def __init__(
        self,
        sizes: Sizes,
        *,
        depth: Annotated[int, Field(ge=0, le=20)] = 3,
        inference: Literal["soft", "hard"] = "hard",
        hardening: Annotated[float, Field(ge=0)] = 3.0,
        temperature: Annotated[float, Field(gt=0)] = 1.0,
        anneal: Annotated[int, Field(ge=0)] = 0,
        leak: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
    ) -> None:
        super().__init__(sizes)
        if sizes.hidden < 1:
            raise UsageError(
                f"a tree of depth {depth} has {2**depth} leaves, and 4 x {sizes.width} hidden values to share would "
                "leave leaves empty; use a smaller depth, or give hidden, the width of one leaf"
            )
        self.inference: Literal["soft", "hard"] = inference
        self.hardening, self.temperature, self.anneal, self.leak = hardening, temperature, anneal, leak
        self.tree = Tree(depth, sizes.width)
        leaves = self.tree.leaves
        self.up = nn.Parameter(torch.empty(leaves, sizes.hidden, sizes.width))
        self.down = nn.Parameter(torch.empty(leaves, sizes.hidden, sizes.width))
        self.up_bias = nn.Parameter(torch.empty(leaves, sizes.hidden)) if sizes.bias else None
        self.down_bias = nn.Parameter(torch.empty(leaves, sizes.width)) if sizes.bias else None
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        return 4.0 * width / 2 ** options.get("depth", 3)

    def reset(self) -> None:
        super().reset()
        self.step.zero_()

    def set_step(self, step: int) -> None:
        self.step.fill_(step)

    def forward(self, read: Read, context: Context) -> Out:
        x = read.u.flatten(0, -2)
        if self.hard:
            return Out(self.one(x, self.tree.leaf(x)).view_as(read.u))
        logits = self.tree.logits(x)
        right = self.right(logits)
        shares = self.tree.shares(self._leaked(right))
        y = self.every(x, shares).view_as(read.u)
        if not self.training:
            return Out(y)
        weights = self._weights(x, context)
        taken = F.one_hot(self.tree.taken(logits.detach()), self.tree.leaves).to(x.dtype)
        entropy = self._entropy(right, weights)
        stats = {"entropy": entropy.detach(), "usage": (weights != 0).to(x.dtype) @ taken}
        return Out(y, self.losses(entropy, weights @ taken, weights.to(x.dtype) @ shares), stats)

    def losses(self, entropy: torch.Tensor, taken: torch.Tensor, shares: torch.Tensor) -> dict[str, torch.Tensor]:
        """What training adds.

        Args:
            entropy: the mean of a decision, in nats.
            taken: the share of the tokens that end at each leaf, (2^d,).
            shares: the mean chance of each leaf, (2^d,).
        """
        return {"hardening": self.hardening * entropy} if self.tree.depth else {}

    @property
    def hard(self) -> bool:
        """Whether a pass is hard now."""
        return self.inference == "hard" and not self.training

    def right(self, logits: torch.Tensor) -> torch.Tensor:
        """The chances to go right at the temperature of this step: (n, nodes)."""
        share = (
            (self.step / self.anneal).clamp(max=1.0) if self.anneal else torch.ones_like(self.step, dtype=torch.float32)
        )
        return torch.sigmoid(logits / (self.temperature**share).to(logits.dtype))

    def every(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """All leaves, weighed: x: (n, D), shares: (n, 2^d) -> (n, D)."""
        bias = None if self.up_bias is None else self.up_bias.flatten()
        hidden = F.relu(F.linear(x, self.up.flatten(0, 1), bias)).unflatten(1, (self.tree.leaves, -1))
        y = (hidden * shares.unsqueeze(-1)).flatten(1) @ self.down.flatten(0, 1)
        return y if self.down_bias is None else y + shares @ self.down_bias

    def one(self, x: torch.Tensor, leaf: torch.Tensor, way: Way | None = None) -> torch.Tensor:
        """The leaf of each token: x: (n, D), leaf: (n,) -> (n, D)."""
        way = way or self.way(len(x))
        if way == "all":
            return self.every(x, F.one_hot(leaf, self.tree.leaves).to(x.dtype))
        if way == "gathered":
            rows = x.unsqueeze(1)
            if self.up_bias is None or self.down_bias is None:
                return torch.bmm(F.relu(torch.bmm(rows, self.up[leaf].mT)), self.down[leaf]).squeeze(1)
            hidden = F.relu(torch.bmm(rows, self.up[leaf].mT) + self.up_bias[leaf].unsqueeze(1))
            return torch.bmm(hidden, self.down[leaf]).squeeze(1) + self.down_bias[leaf]
        order = leaf.argsort(stable=True)
        sorted_ = leaf[order]
        ends = leaf.new_zeros(self.tree.leaves).scatter_add(0, leaf, torch.ones_like(leaf)).cumsum(0)
        hidden = grouped_linear(x[order], self.up, ends)
        hidden = F.relu(hidden if self.up_bias is None else hidden + self.up_bias[sorted_])
        y = grouped_linear(hidden, self.down.mT, ends)
        y = y if self.down_bias is None else y + self.down_bias[sorted_]
        return y[order.argsort()]

    def way(self, tokens: int) -> Way:
        """How hard inference runs for so many tokens."""
        leaves, held = self.tree.leaves, 2 * self.sizes.width * self.sizes.hidden
        products, groups = tokens * held * PRODUCT, min(tokens, leaves)
        times: dict[Way, float] = {
            "gathered": tokens * held * COPY + products,
            "grouped": SORT + 2 * (groups * GROUP + leaves * LOOK) + groups * held * LOAD + products,
            "all": leaves * (held * LOAD + products),
        }
        return min(times, key=lambda way: times[way])

    def _leaked(self, right: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.leak:
            return right
        return torch.where(torch.rand_like(right) < self.leak, 1 - right, right)

    @staticmethod
    def _weights(x: torch.Tensor, context: Context) -> torch.Tensor:
        """What each token counts in a mean: (n,), 0 where it is padding."""
        if context.valid is None:
            return x.new_full((len(x),), 1 / len(x))
        valid = context.valid.flatten().to(x.dtype)
        return valid / valid.sum().clamp(min=1)

    @staticmethod
    def _entropy(right: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mean entropy of a decision in nats, over nodes and tokens."""
        c = (right if right.dtype == torch.float64 else right.float()).clamp(1e-6, 1 - 1e-6)
        each = -(c * c.log() + (1 - c) * (1 - c).log())
        return (weights.to(c.dtype) @ each).sum() / max(1, each.shape[1])

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.up, self.down)

    def neurons(self) -> Sequence[Neuron]:
        names = ("up",) if self.up_bias is None else ("up", "up_bias")
        return [
            Neuron(tuple((name, (leaf, index)) for name in names), (("down", (leaf, index)),), leaf)
            for leaf in range(self.tree.leaves)
            for index in range(self.sizes.hidden)
        ]

    def flops(self, tokens: int) -> float:
        width, leaves = self.sizes.width, self.tree.leaves
        run = 1 if self.hard and self.way(tokens) != "all" else leaves
        nodes = self.tree.read() if self.hard else leaves - 1
        shared = leaves * width if self.down_bias is not None and run == leaves else 0
        return 2.0 * tokens * (nodes * width + run * 2 * width * self.sizes.hidden + shared)

    def active(self) -> int:
        if self.inference == "soft":
            return super().active()
        leaf = sum(part[0].numel() for part in (self.up, self.down, self.up_bias, self.down_bias) if part is not None)
        return leaf + self.tree.depth * (self.sizes.width + 1)
