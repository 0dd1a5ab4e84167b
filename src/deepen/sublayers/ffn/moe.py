"""A sparse mixture of experts: a router sends each token to k of E feed-forwards.

    u ── router ── softmax ── p ── the k largest ── g
    │                                               │
    ├── expert 0 ─╮                                 │
    ├── expert 1 ─┼────────── sum of g_e y_e ───────╯── y
    ╰── ...      ─╯

    l = W_r u   p = softmax(l)   g = p / sum of the k largest, or p itself where k = 1
    losses, in training:  balance E sum_e f_e P_e    z mean logsumexp(l)^2

f_e is the share of the choices that fell on e, P_e the mean of p_e; the balance loss is 1 times its coefficient when
both are uniform, and its gradient reaches the router through P alone. Padding counts in neither. Where k = 1 the gate
is p itself, for a gate of 1 would leave the router without a gradient.

Top-1: Fedus et al., Switch Transformers, arXiv:2101.03961. Top-2: Lepikhin et al., GShard, arXiv:2006.16668. z-loss:
Zoph et al., ST-MoE, arXiv:2202.08906. Without a capacity, as in Gale et al., MegaBlocks, arXiv:2211.15841.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Neuron, Sizes
from deepen.sublayers.ffn.experts import Experts
from deepen.sublayers.ffn.forms import FORMS, Name
from deepen.sublayers.linear import linear


@method(
    "moe",
    family="ffn",
    source="arXiv:1701.06538",
    title="Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
    mechanism="a router sends each token to k of E feed-forwards and adds what they give, weighted",
    cost="the parameters of E feed-forwards and a router [E, D]; the products of k and the router",
)
class MoE(FeedForward):
    """Experts behind a router.

    Args:
        sizes: the hidden width is that of each expert.
        experts: E.
        top: k.
        form: of each expert.
        balance: coefficient of the balance loss.
        z: coefficient of the z-loss.

    Raises:
        UsageError: fewer experts than k.
    """

    outputs: ClassVar[Mapping[str, int]] = {"experts.down": 1, "experts.down_bias": 1}
    equals = "the feed-forward of its form where `experts` is 1"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "gates, losses and their coefficients",
        "N": "one expert is the dense feed-forward, equal experts behind two gates are one of them, losses at uniform",
        "R": "f counts all k choices; the softmax is in single precision, the router's product in that of the model",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Annotated[int, Field(ge=1)] = 8,
        top: Annotated[int, Field(ge=1)] = 2,
        form: Name = "swiglu",
        balance: Annotated[float, Field(ge=0)] = 0.01,
        z: Annotated[float, Field(ge=0)] = 0.001,
    ) -> None:
        super().__init__(sizes)
        if top > experts:
            raise UsageError(f"moe: top {top} of {experts} experts; a token goes to at most as many as there are")
        self.top, self.balance, self.z = top, balance, z
        self.router = nn.Linear(sizes.width, experts, bias=False)
        self.experts = Experts(experts, sizes, sizes.hidden, form)

    @classmethod
    def usual_hidden(cls, width: int, *, form: Name = "swiglu", **options: Any) -> float:
        return FORMS[form].times * width

    def forward(self, read: Read, context: Context) -> Out:
        x = read.u.flatten(0, -2)
        logits = linear(self, "router", x, context)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        p = logits.softmax(-1)
        largest, chosen = p.topk(self.top, dim=-1)
        gates = largest if self.top == 1 else largest / largest.sum(-1, keepdim=True)
        y = self.experts(x, chosen, gates.to(x.dtype)).view_as(read.u)
        with torch.no_grad():
            share = _shares(p, context.valid)
            of_choices = (share / self.top).expand_as(chosen).flatten()
            load = p.new_zeros(self.experts.count).scatter_add(0, chosen.flatten(), of_choices)
        if not self.training:
            return Out(y, stats={"load": load})
        mean = (p * share).sum(0)
        losses = {
            "balance": self.balance * self.experts.count * (load * mean).sum(),
            "z": self.z * (logits.logsumexp(-1, keepdim=True).square() * share).sum(),
        }
        return Out(y, losses, {"load": load})

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.experts.up, self.experts.down)

    def neurons(self) -> Sequence[Neuron]:
        return list(self.experts.neurons())

    def flops(self, tokens: int) -> float:
        return tokens * (2.0 * self.router.weight.numel() + self.top * self.experts.flops)

    def active(self) -> int:
        return self.router.weight.numel() + self.top * self.experts.size


def _shares(p: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """(n, 1), what each token counts in a mean over those that are no padding."""
    if valid is None:
        return p.new_full((len(p), 1), 1 / len(p))
    counted = valid.reshape(-1, 1).to(p.dtype)
    return counted / counted.sum().clamp(min=1)
