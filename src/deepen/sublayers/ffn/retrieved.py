"""Products of a token with rows of a table that it has chosen, without a copy of the rows.

    z_tj = x_t . table[places_tj]

It is what the backward pass of `embedding_bag` computes for its weights, so torch has a kernel for it; gathering the
rows first takes several times as long and n k D numbers of memory. In the backward pass, x gets a weighted bag of rows
of the table, and the table a weighted bag of rows of x, the pairs sorted by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

torch.library.define("deepen::retrieved_products", "(Tensor x, Tensor table, Tensor places) -> Tensor")


def retrieved_products(x: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x: (n, D), table: (N, D), places: (n, k) -> (n, k)."""
    return torch.ops.deepen.retrieved_products(x, table, places)


@torch.library.impl("deepen::retrieved_products", "CompositeExplicitAutograd")
def _products(x: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    bags = torch.arange(len(x), device=x.device)
    products = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x.contiguous(), table, places.flatten(), bags * places.shape[1], bags.repeat_interleave(places.shape[1]), 0
    )
    return products.view_as(places)


@torch.library.register_fake("deepen::retrieved_products")
def _(x: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.new_empty(places.shape)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, table, places = ctx.saved_tensors
    of_x, of_table, _ = ctx.needs_input_grad
    row, order = places.flatten().sort(stable=True)
    starts = torch.searchsorted(row, torch.arange(len(table), device=row.device))
    return (
        F.embedding_bag(places, table, per_sample_weights=gradient, mode="sum") if of_x else None,
        F.embedding_bag(order // places.shape[1], x, starts, per_sample_weights=gradient.flatten()[order], mode="sum")
        if of_table
        else None,
        None,
    )


torch.library.register_autograd("deepen::retrieved_products", _backward, setup_context=_keep)
