"""The fast feed-forward with balanced leaves and a master leaf that always runs.

    u ──┬── tree over leaves ── y_tree ── * k ─────╮
        ╰── W_up ── relu ── W_down ── m ── * (1 - k) ── + ── y         k = sigmoid(mix), one number

    balance loss   a 2^d (sum over l of f_l P_l)

P_l is the mean chance of leaf l, and f_l the share of the tokens that end there by hard decisions, which has no
gradient. The sum is 1 / 2^d where the tokens are spread evenly, and 1 where all go one way. Training has two phases:
up to the step `switch` balance counts and hardening has the coefficient 1, after it hardening counts alone.

Source: Charalampopoulos et al., Enhancing Fast Feed Forward Networks with Load Balancing and a Master Leaf Node,
arXiv:2405.16836.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import Neuron, Sizes
from deepen.sublayers.ffn.fast_feed_forward import FastFeedForward
from deepen.sublayers.ffn.relu import ReLU

# The logit of the tree's share at first, and the coefficient of hardening before the switch.
MIX, SOFTLY = 0.5, 1.0


@method(
    "master-leaf",
    family="ffn",
    source="arXiv:2405.16836",
    title="Enhancing Fast Feed Forward Networks with Load Balancing and a Master Leaf Node",
    mechanism="a fast feed-forward whose leaves are used evenly, mixed with a small feed-forward that always runs",
    cost="over a fast feed-forward one small feed-forward and a number",
)
class MasterLeaf(FastFeedForward):
    """A tree over leaves, and one leaf for all tokens.

    Args:
        sizes: with the width of one leaf as hidden width.
        depth: d, for 2^d leaves.
        inference: what evaluation computes; training is always soft.
        hardening: the coefficient of the hardening loss.
        balance: a, the coefficient of the balance loss.
        switch: steps of the first phase; None: both losses have their coefficients all the time.
        master: hidden width of the leaf that always runs.
        temperature: of the decisions at the end of `anneal`.
        anneal: steps over which it falls from 1; 0: it has its last value from the start.
        leak: the chance that a node's decision is turned around, for each token, in training.
    """

    outputs: ClassVar[Mapping[str, int]] = {
        **FastFeedForward.outputs, "master.down.weight": 0, "master.down.bias": 0,
    }  # fmt: skip
    equals: ClassVar[str] = "a fast feed-forward as its mix grows"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the balance loss, the mix of 0.6225 at first, the two phases and their coefficients",
        "N": "the balance loss is 1 where leaves are used evenly and 2^d where one is; its gradient goes through P",
        "R": "the switch by steps; as for the fast feed-forward otherwise",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        depth: Annotated[int, Field(ge=0, le=20)] = 3,
        inference: Literal["soft", "hard"] = "hard",
        hardening: Annotated[float, Field(ge=0)] = 3.0,
        balance: Annotated[float, Field(ge=0)] = 1.0,
        switch: Annotated[int, Field(ge=0)] | None = None,
        master: Annotated[int, Field(ge=1)] = 8,
        temperature: Annotated[float, Field(gt=0)] = 1.0,
        anneal: Annotated[int, Field(ge=0)] = 0,
        leak: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
    ) -> None:
        super().__init__(
            sizes, depth=depth, inference=inference, hardening=hardening, temperature=temperature, anneal=anneal,
            leak=leak,
        )  # fmt: skip
        self.balance, self.switch = balance, switch
        self.master = ReLU(Sizes(width=sizes.width, hidden=master, bias=sizes.bias))
        self.mix = nn.Parameter(torch.empty(1))

    def reset(self) -> None:
        super().reset()
        nn.init.constant_(self.mix, MIX)

    def forward(self, read: Read, context: Context) -> Out:
        found, k = super().forward(read, context), torch.sigmoid(self.mix)
        always = self.master(read, context._replace(adapters={})).y
        return found._replace(y=k * found.y + (1 - k) * always)

    def losses(self, entropy: torch.Tensor, taken: torch.Tensor, shares: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.tree.depth:
            return {}
        balance = self.balance * self.tree.leaves * (taken * shares).sum()
        if self.switch is None:
            return {"hardening": self.hardening * entropy, "balance": balance}
        first = self.step < self.switch
        return {"hardening": torch.where(first, SOFTLY, self.hardening) * entropy, "balance": first * balance}

    def neurons(self) -> Sequence[Neuron]:
        own: list[Neuron] = []
        for each in self.master.neurons():
            reads, writes = (
                tuple((f"master.{name}", place) for name, place in places) for places in (each.reads, each.writes)
            )
            own.append(Neuron(reads, writes, self.tree.leaves))
        return [*super().neurons(), *own]

    def flops(self, tokens: int) -> float:
        return super().flops(tokens) + self.master.flops(tokens)

    def active(self) -> int:
        # in soft inference all parameters are counted already
        own = sum(parameter.numel() for parameter in self.master.parameters()) + 1
        return super().active() + (0 if self.inference == "soft" else own)
