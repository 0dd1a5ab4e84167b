"""Feed-forwards side by side, each token through those that are chosen for it.

    y_t = sum over the chosen e of w_te  W_down,e form(W_up,e x_t)

The chosen pairs of token and expert are sorted by expert, so that each expert is one product over its tokens and takes
as long as it has tokens; none is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from deepen.sublayers.ffn.base import Neuron, Place, Sizes
from deepen.sublayers.ffn.forms import FORMS, Name
from deepen.sublayers.ffn.grouped import grouped_linear


class Experts(nn.Module):
    """E feed-forwards of one form.

    Args:
        count: E.
        sizes: of the whole feed-forward.
        hidden: H, the hidden width of one expert.
        form: what stands between its maps.
    """

    def __init__(self, count: int, sizes: Sizes, hidden: int, form: Name) -> None:
        super().__init__()
        self.count, self.hidden, self.gelu, self.form = count, hidden, sizes.gelu, FORMS[form]
        rows = self.form.rows(hidden)
        self.up = nn.Parameter(torch.empty(count, rows, sizes.width))
        self.down = nn.Parameter(torch.empty(count, sizes.width, hidden))
        self.up_bias = nn.Parameter(torch.empty(count, rows)) if sizes.bias else None
        self.down_bias = nn.Parameter(torch.empty(count, sizes.width)) if sizes.bias else None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """x: (n, D), chosen experts: (n, k), their weights: (n, k) or None for 1 -> (n, D)."""
        per_token = chosen.shape[1]
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        ends = expert.new_zeros(self.count).scatter_add(0, expert, torch.ones_like(expert)).cumsum(0)
        sorted_, rows = expert[order], x.index_select(0, order // per_token)
        hidden = grouped_linear(rows, self.up, ends)
        if self.up_bias is not None:
            hidden = hidden + self.up_bias[sorted_]
        y = grouped_linear(self.form(hidden, self.gelu), self.down, ends)
        if self.down_bias is not None:
            y = y + self.down_bias[sorted_]
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, back).unflatten(0, (-1, per_token))
        return y.sum(1) if weights is None else (y * weights.unsqueeze(-1)).sum(1)

    def neurons(self) -> Iterator[Neuron]:
        """Those of each expert, which are a group, named as a submodule `experts`."""
        names = ("experts.up",) if self.up_bias is None else ("experts.up", "experts.up_bias")
        for expert in range(self.count):
            for index in range(self.hidden):
                rows = range(index, self.form.rows(self.hidden), self.hidden)
                reads: tuple[Place, ...] = tuple((name, (expert, row)) for row in rows for name in names)
                yield Neuron(reads, (("experts.down", (expert, slice(None), index)),), expert)

    @property
    def size(self) -> int:
        """Parameters of one expert."""
        return sum(parameter[0].numel() for parameter in self.parameters())

    @property
    def flops(self) -> float:
        """FLOPs of the products of one token in one expert."""
        return 2.0 * (self.up[0].numel() + self.down[0].numel())
