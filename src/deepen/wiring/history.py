"""The outputs so far, kept once and mixed without a copy of all of them.

    history = History.start(x, room)     x: (B, T, D)
    history = history.push(y)
    history.mix(weights)                 sum_j w_j v_j, with one weight a source or one a source and token
    history.mixes(weights)               several of them at once, with one weight a mix and source
    history.dot(vector)                  v_j . vector of every source

The sources lie side by side in one buffer (room, B, T, D), each written once; a mix is one product with the buffer, and
its backward pass reads the same memory. A compiler fuses a plain sum by itself, so it gets that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class History(NamedTuple):
    """Sources v_0, v_1 ...

    Attributes:
        sources: each (B, T, D).
        buffer: (room, B, T, D), of which the first `len(sources)` are written; None where a compiler traces.
    """

    sources: tuple[torch.Tensor, ...]
    buffer: torch.Tensor | None

    @classmethod
    def start(cls, x: torch.Tensor, room: int) -> History:
        """One source x: (B, T, D), and room for `room` of them."""
        if torch.compiler.is_compiling():
            return cls((x,), None)
        return cls((), x.new_empty((room, *x.shape))).push(x)

    def push(self, x: torch.Tensor) -> History:
        """One more source."""
        if self.buffer is None:
            return History((*self.sources, x), None)
        kept = _Keep.apply(x, self.buffer, len(self.sources))
        return History((*self.sources, kept), self.buffer)  # pyright: ignore[reportArgumentType]

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """The sum over j of w_j v_j; weights: (sources,) or (sources, B, T)."""
        if self.buffer is None:
            return (_broad(weights) * torch.stack(self.sources)).sum(0).to(self.sources[0].dtype)
        return _Mix.apply(weights, self.buffer, *self.sources)  # pyright: ignore[reportReturnType]

    def mixes(self, weights: torch.Tensor) -> torch.Tensor:
        """Several mixes at once; weights: (mixes, sources), result: (mixes, B, T, D)."""
        if self.buffer is None:
            return torch.tensordot(weights, torch.stack(self.sources), dims=1)
        return _Mixes.apply(weights, self.buffer, *self.sources)  # pyright: ignore[reportReturnType]

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        """The product of every source with a vector (D,); (sources, B, T)."""
        if self.buffer is None:
            return torch.stack(self.sources) @ vector
        return _Dot.apply(vector, self.buffer, *self.sources)  # pyright: ignore[reportReturnType]


def _broad(weights: torch.Tensor) -> torch.Tensor:
    return weights[:, None, None, None] if weights.ndim == 1 else weights[..., None]


class _Keep(torch.autograd.Function):
    """Copies x into its place in the buffer and returns that place, as a tensor of its own for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor, place: int) -> torch.Tensor:
        kept = x.new_empty(0).set_(buffer.untyped_storage(), place * x.numel(), x.shape)  # pyright: ignore
        return kept.copy_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, buffer: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        written = ctx.written = buffer[: len(sources)]
        if weights.ndim == 1:
            return (weights.to(buffer.dtype) @ written.flatten(1)).view(buffer.shape[1:])
        return torch.einsum("nbt,nbtd->btd", weights.to(buffer.dtype), written)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        grad, needs = grads[0], ctx.needs_input_grad
        to_weights = None
        if needs[0] and weights.ndim == 1:
            to_weights = (ctx.written.flatten(1) @ grad.flatten()).to(weights.dtype)
        elif needs[0]:
            to_weights = torch.einsum("nbtd,btd->nbt", ctx.written, grad).to(weights.dtype)
        each = _broad(weights).to(grad.dtype)
        return to_weights, None, *(each[j] * grad if need else None for j, need in enumerate(needs[2:]))


class _Mixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, buffer: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        written = ctx.written = buffer[: len(sources)]
        return (weights.to(buffer.dtype) @ written.flatten(1)).view(-1, *buffer.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        grad, needs = grads[0].flatten(1), ctx.needs_input_grad
        to_weights = (grad @ ctx.written.flatten(1).T).to(weights.dtype) if needs[0] else None
        each = weights.T.to(grad.dtype)
        shape = ctx.written.shape[1:]
        return to_weights, None, *((each[j] @ grad).view(shape) if need else None for j, need in enumerate(needs[2:]))


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, buffer: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vector)
        ctx.written = buffer[: len(sources)]
        return ctx.written @ vector.to(buffer.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (vector,) = ctx.saved_tensors
        grad, needs = grads[0], ctx.needs_input_grad
        to_vector = None
        if needs[0]:
            to_vector = (grad.flatten() @ ctx.written.flatten(0, -2)).to(vector.dtype)
        wide = vector.to(grad.dtype)
        return to_vector, None, *(grad[j][..., None] * wide if need else None for j, need in enumerate(needs[2:]))
