"""A layer of the bank: its mixer and its feed-forward, each with the norms that the wiring asks for."""

from __future__ import annotations

from torch import nn

from deepen.stack.config import StackConfig
from deepen.sublayers.contract import Context, Out, Read
from deepen.wiring.base import Wiring


class Part(nn.Module):
    """A sublayer with the norm before it and the norm that the wiring applies after it; either may be the identity."""

    def __init__(self, sublayer: nn.Module, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.norm, self.sublayer, self.after = before, sublayer, after

    def forward(self, read: Read, context: Context, factor: float = 1.0) -> Out:
        """The output of the sublayer; `factor` multiplies its normalised input."""
        norm = self.norm
        normed = Read(
            norm(read.u), read.k if read.k is None else norm(read.k), read.v if read.v is None else norm(read.v)
        )
        if factor != 1:
            normed = Read(*(None if x is None else x * factor for x in normed[:3]))  # pyright: ignore
        return self.sublayer(normed, context)


class Layer(nn.Module):
    """The parts `a` (mixer) and `f` (feed-forward) of one layer."""

    def __init__(self, config: StackConfig, window: int | None, wiring: type[Wiring]) -> None:
        super().__init__()
        self.a = Part(config.new_mixer(window), *_norms(config, wiring, "a"))
        self.f = Part(config.new_feed_forward(), *_norms(config, wiring, "f"))


def make_norm(config: StackConfig) -> nn.Module:
    """A norm of the stream."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.eps)
    return nn.LayerNorm(config.width, eps=config.eps)


def _norms(config: StackConfig, wiring: type[Wiring], part: str) -> tuple[nn.Module, nn.Module]:
    before, after = (make_norm(config) if part in parts else nn.Identity() for parts in (wiring.before, wiring.after))
    return before, after
