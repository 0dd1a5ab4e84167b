"""A linear layer of which one block is trained: a small parameter of its own, whose values are written back.

    y  = W x + b                            the layer's own forward, of all of W
    dx = G W                                G [t, n]: gradient of y
    dP = G[:, rows]^T x[:, columns]         P = W[rows, columns]: the only part with a gradient and moments

For the backward pass only x[:, columns] is kept, unless the whole gradient of W is watched. A mask over a gradient of
the full size would let weight decay and old moments move the entries outside of it; here nothing of them exists.

Sources: the block gradient of SliceFine, arXiv:2510.08513, and of LoSiA-Pro, arXiv:2507.04487.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from deepen.train.selective.block import TURNED, Block


class Sliced(nn.Module):
    """Stands in the place of a linear layer while a block of its matrix is trained.

    Attributes:
        base_layer: the layer; its matrix requires no gradient.
        block: what is trained of it.
        part: the trained values.
        watched: whether `gradient` is gathered; it is summed over pieces of a batch and visits of the layer.
        gradient: of the whole matrix, in its order, in fp32; None before the first.
    """

    def __init__(self, base_layer: Any, block: Block) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.turned = type(base_layer).__name__ == TURNED
        self.watched = False
        self.gradient: torch.Tensor | None = None
        base_layer.weight.requires_grad_(False)
        self.block = block.to(base_layer.weight.device)
        self.part = nn.Parameter(self.block.take(base_layer.weight.detach(), self.turned))

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, for models that look at its type or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs [..., n] of inputs [..., m]."""
        return _Through.apply(x, self.weight, self.bias, self.part, self)

    def move(self, block: Block) -> None:
        """Trains another block from now on; the values of the one before stay in the matrix."""
        self.block = block.to(self.weight.device)
        self.part.data = self.block.take(self.weight.detach(), self.turned)
        self.part.grad = None

    @torch.no_grad()
    def write(self, rate: float = 1.0) -> None:
        """Writes the part into the matrix.

        Args:
            rate: the share of the last update that counts; one of AdamW is linear in its learning rate, so this is
                an update of that share of the rate.
        """
        if rate < 1:
            self.part.copy_(torch.lerp(self.block.take(self.weight, self.turned), self.part, rate))
        self.block.put(self.weight, self.part, self.turned)


class _Through(torch.autograd.Function):
    """The layer's own forward; the backward of the file's head."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part: torch.Tensor, sliced: Sliced
    ) -> torch.Tensor:
        y = sliced.base_layer(x)
        columns = None if sliced.watched else sliced.block.columns
        kept = (x if columns is None else x[..., columns]).to(y.dtype)
        ctx.save_for_backward(kept if ctx.needs_input_grad[3] else None, weight)
        ctx.sliced, ctx.block, ctx.dtypes = sliced, sliced.block, (x.dtype, part.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        kept, weight = ctx.saved_tensors
        sliced, (x_dtype, part_dtype) = ctx.sliced, ctx.dtypes
        flat = grad.reshape(-1, grad.shape[-1])
        to_x = to_bias = to_part = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(flat.dtype)
            to_x = (flat @ (matrix.t() if sliced.turned else matrix)).view(*grad.shape[:-1], -1).to(x_dtype)
        if ctx.needs_input_grad[2]:
            to_bias = flat.sum(0).to(part_dtype)
        if kept is not None:
            to_part = _of_part(sliced, ctx.block, flat, kept.reshape(-1, kept.shape[-1])).to(part_dtype)
        return to_x, None, to_bias, to_part, None


def _of_part(sliced: Sliced, block: Block, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the part from those of the outputs, [t, n], and the inputs that were kept, [t, columns]."""
    if sliced.watched:
        whole = x.t() @ grad if sliced.turned else grad.t() @ x
        sliced.gradient = whole.float() if sliced.gradient is None else sliced.gradient + whole
        return block.take(whole, sliced.turned)
    if block.rows is not None:
        grad = grad.index_select(1, block.rows)
    found = x.t() @ grad if sliced.turned else grad.t() @ x
    return found if block.entries is None else block.take(found, sliced.turned)
