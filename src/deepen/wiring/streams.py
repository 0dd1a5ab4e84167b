"""What wirings of n streams share: the state is (B, T, n, D), at first n copies of the embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepen.wiring.base import Earlier, Shape, Wiring


class Streams(Wiring):
    """n streams in the place of one; groups, scales, gates and entries act on each of them alike, marks see their mean.

    Args:
        shape: what it is built for.
        streams: n.
    """

    def __init__(self, shape: Shape, streams: int) -> None:
        super().__init__(shape)
        self.streams = streams

    def init(self, x: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        return copies(x, self.streams)

    def readout(self, state: torch.Tensor) -> torch.Tensor:
        return state.mean(-2)

    def change(self, state: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return each(state, function)

    def combine(self, states: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor]) -> torch.Tensor:
        return super().combine(states, [along_streams(weight) for weight in weights])


def copies(x: torch.Tensor, streams: int) -> torch.Tensor:
    """The stream x: (B, T, D) n times, (B, T, n, D)."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])


def each(streams: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A function of (B, T, D) on each of the streams (B, T, n, D)."""
    return torch.stack([function(stream) for stream in streams.unbind(-2)], dim=-2)


def along_streams(weight: float | torch.Tensor) -> float | torch.Tensor:
    """A weight (1), (D) or (B, T, 1) of a stream as one of n streams."""
    return weight.unsqueeze(-2) if isinstance(weight, torch.Tensor) and weight.ndim > 1 else weight
