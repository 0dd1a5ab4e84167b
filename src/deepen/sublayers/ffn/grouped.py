"""Products of rows with the matrix of their group, for rows that lie sorted by group.

    group 0: x[: ends[0]]    group e: x[ends[e - 1] : ends[e]]

No matrix is gathered or padded: each group that has rows is one product. Both are operations of torch, so that a
compiler takes them as they are, and each is made of the other in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

torch.library.define("deepen::grouped_linear", "(Tensor x, Tensor weight, Tensor ends) -> Tensor")
torch.library.define("deepen::grouped_outer", "(Tensor left, Tensor right, Tensor ends) -> Tensor")


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x: (n, in) in groups, weight: (E, out, in), ends: (E,) -> (n, out), row i times the matrix of its group."""
    return torch.ops.deepen.grouped_linear(x, weight, ends)


def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left: (n, out), right: (n, in), both in groups -> (E, out, in), the sum of a group's outer products."""
    return torch.ops.deepen.grouped_outer(left, right, ends)


@torch.library.impl("deepen::grouped_linear", "CompositeExplicitAutograd")
def _linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(len(x), weight.shape[1])
    for group, rows in _groups(ends):
        torch.mm(x[rows], weight[group].T, out=y[rows])
    return y


@torch.library.impl("deepen::grouped_outer", "CompositeExplicitAutograd")
def _outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for group, rows in _groups(ends):
        torch.mm(left[rows].T, right[rows], out=sums[group])
    return sums


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


@torch.library.register_fake("deepen::grouped_linear")
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("deepen::grouped_outer")
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight, _ = ctx.needs_input_grad
    return (
        grouped_linear(gradient, weight.mT, ends) if of_x else None,
        grouped_outer(gradient, x, ends) if of_weight else None,
        None,
    )


def _outer_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    of_left, of_right, _ = ctx.needs_input_grad
    return (
        grouped_linear(right, gradient, ends) if of_left else None,
        grouped_linear(left, gradient.mT, ends) if of_right else None,
        None,
    )


torch.library.register_autograd("deepen::grouped_linear", _linear_backward, setup_context=_keep)
torch.library.register_autograd("deepen::grouped_outer", _outer_backward, setup_context=_keep)
