"""Experts made of the neurons of a trained feed-forward: a router says which k of E act on a token, without weights.

    u ──┬── router ── the k highest scores ──╮
        ├── expert 0 ─╮                      │
        ├── ...      ─┼── sum of the chosen ─╯── + b ── y
        ╰── expert E ─╯

    y = b + sum of W_down,e form(W_up,e u) over the chosen e

    oracle        sum of |h_i| |v_i| over the neurons of an expert, v_i its column out; it computes all h to know
    similarity    W u, the rows of W mean keys at length 1
    linear        W u + b
    mlp           W tanh(W_in u + b_in) + b

With all experts active it is the dense feed-forward, and no router runs. The choice has no gradient, so training moves
the experts and leaves the router as it is: `deepen.split_experts` makes both from a trained stack.

Source: Zhang et al., MoEfication, arXiv:2110.01786. The linear router: Zhao et al., FactorLLM, arXiv:2408.11855.
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
from deepen.sublayers.ffn.experts import Experts
from deepen.sublayers.ffn.forms import FORMS, Name

Kind = Literal["oracle", "similarity", "linear", "mlp"]


@method(
    "moefied",
    family="ffn",
    source="arXiv:2110.01786",
    title="MoEfication: Transformer Feed-forward Layers are Mixtures of Experts",
    mechanism="the neurons of a trained feed-forward as E experts; a fixed router runs k of them, unweighted",
    cost="the parameters of the dense one and a router; the products of k / E of it and the router",
)
class Moefied(FeedForward):
    """A dense feed-forward in experts.

    Args:
        sizes: the hidden width is that of all experts together.
        experts: E.
        top: k.
        router: what chooses.
        form: of the feed-forward.

    Raises:
        UsageError: a hidden width that the experts cannot share evenly, or fewer of them than k.
    """

    outputs: ClassVar[Mapping[str, int]] = {"experts.down": 1, "bias": 0}
    equals: ClassVar[str] = "the feed-forward of its form where `top` is `experts`"
    dead: ClassVar[Mapping[str, str]] = {"router.*": "the choice of experts has no gradient"}
    marks: ClassVar[Mapping[str, str]] = {
        "K": "experts of equal size, the routers, no weights on what they give",
        "N": "all experts are the dense feed-forward; the oracle loses least where neurons fire in groups",
        "R": "a new model begins with a random router",
    }

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Annotated[int, Field(ge=1)] = 8,
        top: Annotated[int, Field(ge=1)] = 2,
        router: Kind = "linear",
        form: Name = "swiglu",
    ) -> None:
        super().__init__(sizes)
        if sizes.hidden % experts:
            raise UsageError(
                f"moefied: {sizes.hidden} neurons cannot be split into {experts} experts of equal size; choose a "
                "number of experts that divides the hidden width"
            )
        if top > experts:
            raise UsageError(f"moefied: top {top} of {experts} experts; a token runs from 1 to all of them")
        self.top, self.kind = top, router
        self.experts = Experts(experts, sizes, sizes.hidden // experts, form)
        # one for the whole, not one for each expert
        self.experts.down_bias = None
        self.bias = nn.Parameter(torch.empty(sizes.width)) if sizes.bias else None
        self.router = None if router == "oracle" else Router(router, sizes.width, experts)

    @classmethod
    def usual_hidden(cls, width: int, *, form: Name = "swiglu", **options: Any) -> float:
        return FORMS[form].times * width

    def forward(self, read: Read, context: Context) -> Out:
        x = read.u.flatten(0, -2)
        y = self._dense(x) if self.router is None or self.whole else self.experts(x, self._chosen(self.router(x)))
        return Out((y if self.bias is None else y + self.bias).view_as(read.u))

    @property
    def whole(self) -> bool:
        """Whether all experts act on every token."""
        return self.top == self.experts.count

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(self.top, dim=-1, sorted=False).indices

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert, (n, D) -> (n, D); those that the oracle does not choose are left out of the sum."""
        own = self.experts
        rows = F.linear(x, own.up.flatten(0, 1), None if own.up_bias is None else own.up_bias.flatten())
        hidden = own.form(rows.unflatten(-1, (own.count, -1)), own.gelu)
        if not self.whole:
            masses = (hidden.detach().abs() * own.down.detach().norm(dim=1)).sum(-1)
            hidden = hidden * torch.zeros_like(masses).scatter(-1, self._chosen(masses), 1.0).unsqueeze(-1)
        return hidden.flatten(1) @ own.down.mT.flatten(0, 1)

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.experts.up, self.experts.down)

    def neurons(self) -> Sequence[Neuron]:
        # the oracle looks at what they write: one that is silenced changes the choice
        return [] if self.router is None and not self.whole else list(self.experts.neurons())

    def flops(self, tokens: int) -> float:
        if self.router is None or self.whole:
            return tokens * self.experts.count * self.experts.flops
        return tokens * (self.router.flops + self.top * self.experts.flops)

    def active(self) -> int:
        held = 0 if self.router is None else sum(each.numel() for each in self.router.parameters())
        shared = 0 if self.bias is None else self.bias.numel()
        return self.top * self.experts.size + held + shared


class Router(nn.Module):
    """Scores of experts: (n, D) -> (n, E). It is not trained.

    Args:
        kind: `similarity`, `linear` or `mlp`.
        width: D.
        experts: E.
    """

    def __init__(self, kind: Kind, width: int, experts: int) -> None:
        super().__init__()
        deep = kind == "mlp"
        self.inner = nn.Parameter(torch.empty(experts, width), False) if deep else None
        self.inner_bias = nn.Parameter(torch.empty(experts), False) if deep else None
        self.weight = nn.Parameter(torch.empty(experts, experts if deep else width), False)
        self.bias = None if kind == "similarity" else nn.Parameter(torch.empty(experts), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is not None:
            x = torch.tanh(F.linear(x, self.inner, self.inner_bias))
        return F.linear(x, self.weight, self.bias)

    @property
    def flops(self) -> float:
        """FLOPs of its products for one token."""
        return 2.0 * (self.weight.numel() + (0 if self.inner is None else self.inner.numel()))
