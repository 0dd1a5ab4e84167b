"""CSPNet, cross stage partial network: a part of the channels goes around a stage, so that gradients are not repeated.

    x = [x', x'']          y = U [x', T [x'', d_1 .. d_k]]          d_l = h([x'', d_1 .. d_l-1]), a dense layer

    x ─┬─ x'' ── dense block ── T ─┬─ U ── y
       └─ x' ──────────────────────┘

In a dense block the gradient of every layer enters the input once more. Here the x' half of it comes from U alone, and
the dense layers read, and send gradient to, x'' alone. T and U are BN relu conv1x1. `fusion` says which of the two
there are: `both`, `first` (the parts are joined before one transition, U) or `last` (after one transition, T). A mean
pool of stride 2 stands between stages. T keeps a share of its channels, or U where T is not; U keeps all otherwise (R).

`split=0` with `last` is the dense block and its transition.

Source: Wang et al., CSPNet: A New Backbone that can Enhance Learning Capability of CNN, arXiv:1911.11929; as a design
of gradient paths: arXiv:2211.04800.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import Preactivated, convolution, weights
from deepen.stack.shapes.densenet import DenseBlock, DenseNetConfig

Fusion = Literal["both", "first", "last"]


class Channels(NamedTuple):
    """Of a stage: those that go around, those that enter the block, what it gives, and what T and U give."""

    around: int
    inside: int
    block: int
    t: int
    u: int


class CSPNetConfig(ImageConfig):
    """What a cross stage partial network is built from.

    Attributes:
        blocks: dense layers of each stage.
        growth: channels that a dense layer adds.
        width: of the stem.
        bottleneck: whether a dense layer has a 1x1 convolution first.
        split: the share of the channels that goes around.
        fusion: which transitions there are.
        compression: the share of the channels that the first transition keeps.
    """

    blocks: tuple[int, ...] = Field(default=(6, 12, 24, 16), min_length=1)
    growth: int = Field(default=12, ge=1)
    width: int = Field(default=24, ge=1)
    bottleneck: bool = True
    split: float = Field(default=0.5, ge=0, lt=1)
    fusion: Fusion = "both"
    compression: float = Field(default=0.5, gt=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.blocks) < 1:
            raise ValueError(f"every stage needs a layer, got {self.blocks}")
        for each in self.plan():
            if min(each.inside, each.t, each.u) < 1:
                raise ValueError(f"a stage is left without channels: {each}; lower split or raise compression")
        return self

    @property
    def halvings(self) -> int:
        return len(self.blocks) - 1

    def plan(self) -> list[Channels]:
        """The channels of each stage."""
        found, entry = [], self.width
        for layers in self.blocks:
            around = round(self.split * entry)
            inside = entry - around
            block = inside + layers * self.growth
            t = block if self.fusion == "first" else int(block * self.compression)
            u = int((around + t) * self.compression) if self.fusion == "first" else around + t
            found.append(Channels(around, inside, block, t, u))
            entry = u
        return found

    @property
    def parameters(self) -> int:
        dense = DenseNetConfig(growth=self.growth, bottleneck=self.bottleneck)
        found = weights(self.channels, self.width)
        for layers, each in zip(self.blocks, self.plan(), strict=True):
            found += dense.block(each.inside, layers)
            found += 0 if self.fusion == "first" else 2 * each.block + weights(each.block, each.t, 1)
            joined = each.around + each.t
            found += 0 if self.fusion == "last" else 2 * joined + weights(joined, each.u, 1)
        last = self.plan()[-1].u
        return found + 2 * last + self.head(last)


class Stage(nn.Module):
    """A dense block that a part of the channels goes around."""

    def __init__(self, channels: Channels, layers: int, growth: int, bottleneck: bool, fusion: Fusion) -> None:
        super().__init__()
        self.around = channels.around
        self.block = DenseBlock(channels.inside, layers, growth, bottleneck)
        first, last = fusion == "first", fusion == "last"
        self.t = nn.Identity() if first else Preactivated(channels.block, channels.t, 1)
        self.u = nn.Identity() if last else Preactivated(channels.around + channels.t, channels.u, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, around + inside, H, W) -> (B, u, H, W)."""
        around, inside = x[:, : self.around], x[:, self.around :]
        return self.u(torch.cat([around, self.t(self.block(inside))], dim=1))


@method(
    "cspnet",
    family="shape",
    source="arXiv:1911.11929",
    title="CSPNet: A New Backbone that can Enhance Learning Capability of CNN",
    mechanism="a part of the channels goes around each dense block and joins behind it",
    cost="less than the dense block on all channels; one transition more with both",
)
class CSPNet(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> CSPNet(CSPNetConfig(blocks=(2, 2), growth=4, width=8))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: CSPNetConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.stem = convolution(config.channels, config.width)
            self.stages = nn.ModuleList(
                Stage(each, layers, config.growth, config.bottleneck, config.fusion)
                for layers, each in zip(config.blocks, config.plan(), strict=True)
            )
            last = config.plan()[-1].u
            self.norm = nn.BatchNorm2d(last)
            self.head = nn.Linear(last, config.classes)
            initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        x = self.stem(images)
        for index, stage in enumerate(self.stages):
            x = stage(F.avg_pool2d(x, 2) if index else x)
        return self.head(F.relu(self.norm(x)).mean(dim=(-2, -1)))
