"""ResNet: a network of convolutions whose blocks add to what they read; wide, pre-activated, or plain as a control.

    original         x' = relu(S(x) + F(x))     F = conv BN relu conv BN               He et al., arXiv:1512.03385
    pre-activation   x' = S(x) + F(x)           F = BN relu conv BN relu conv          He et al., arXiv:1603.05027
    plain            x' = relu(F(x)) or F(x)    the same parameters, no shortcut

    x ──┬── conv 3x3 ── conv 3x3 ───────────────── + ── x'     basic, two convolutions
        ├── conv 1x1 ── conv 3x3 ── conv 1x1 ──────┤           bottleneck, the last 4 times as wide
        └── S: x, every second pixel, projected ───┘

S is the identity. Where the shape changes it takes every second pixel and a 1x1 convolution (`projection`), or pads
channels of zeros (`pad`), which has no parameters. In a pre-activated block the projection reads relu(BN(x)). A wide
ResNet multiplies the width of every stage but the stem: Zagoruyko and Komodakis, arXiv:1605.07146, which also drops out
between the two convolutions. The stride is that of the 3x3 convolution, as in torchvision, whose names parameters have.

At first, with `zero_last`, every branch is 0 and a block whose shape stays is the identity: the last norm's gain is 0,
or the last convolution of a pre-activated block (R: a gain of 0 before a relu would never learn).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import convolution, weights


class ResNetConfig(ImageConfig):
    """What a ResNet is built from.

    Attributes:
        blocks: of each stage; a stage has twice the width and half the size of the one before.
        width: of the stem and of the first stage.
        widen: the factor of a wide ResNet.
        block: `basic` or `bottleneck`.
        preactivation: whether norms and relus come before convolutions.
        shortcut: what it does where the shape changes.
        residual: False for the plain control, which has the parameters of the net with `pad`.
        stem: `small`, a 3x3 convolution, or `large`, a 7x7 one of stride 2 and a pool of stride 2.
        zero_last: whether branches begin at 0.
        dropout: of a wide ResNet.
    """

    blocks: tuple[int, ...] = Field(default=(2, 2, 2, 2), min_length=1)
    width: int = Field(default=64, ge=1)
    widen: int = Field(default=1, ge=1)
    block: Literal["basic", "bottleneck"] = "basic"
    preactivation: bool = False
    shortcut: Literal["projection", "pad"] = "projection"
    residual: bool = True
    stem: Literal["small", "large"] = "small"
    zero_last: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.blocks) < 1:
            raise ValueError(f"every stage needs a block, got {self.blocks}")
        for width in (width * self.expansion for width in self.widths):
            if (kept := self.kept(width)) < width and self.shortcut == "projection":
                raise ValueError(f"a shortcut of {kept} of {width} channels is not projected; use shortcut='pad'")
            if kept < width and self.zero_last:
                raise ValueError(f"a shortcut of {kept} of {width} channels needs branches; use zero_last=False")
        return self

    @property
    def expansion(self) -> int:
        """How much wider a block's output is than its inside."""
        return 1 if self.block == "basic" else 4

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the insides of the blocks of each stage."""
        return tuple(self.width * self.widen * 2**stage for stage in range(len(self.blocks)))

    @property
    def halvings(self) -> int:
        return len(self.blocks) - 1 + (2 if self.stem == "large" else 0)

    def kept(self, channels: int) -> int:
        """How many of the first channels the shortcut carries."""
        return channels if self.residual else 0

    def convolutions(self, inputs: int, width: int, stride: int) -> list[tuple[int, int, int, int]]:
        """Inputs, outputs, kernel and stride of each convolution of a block."""
        if self.block == "basic":
            return [(inputs, width, 3, stride), (width, width, 3, 1)]
        return [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]

    def plan(self) -> list[list[tuple[int, int, int]]]:
        """Inputs, inside width and stride of each block of each stage."""
        inputs, stages = self.width, []
        for stage, (count, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            stages.append([])
            for index in range(count):
                stages[-1].append((inputs, width, 2 if stage and not index else 1))
                inputs = width * self.expansion
        return stages

    def projected(self, inputs: int, width: int, stride: int) -> bool:
        """Whether a block's shortcut has a convolution."""
        return self.shortcut == "projection" and (inputs != width * self.expansion or stride > 1)

    @property
    def parameters(self) -> int:
        kernel = 3 if self.stem == "small" else 7
        found = weights(self.channels, self.width, kernel) + (0 if self.preactivation else 2 * self.width)
        for inputs, width, stride in (each for stage in self.plan() for each in stage):
            for source, target, kernel, _ in self.convolutions(inputs, width, stride):
                found += weights(source, target, kernel) + 2 * (source if self.preactivation else target)
            if self.projected(inputs, width, stride):
                outputs = width * self.expansion
                found += weights(inputs, outputs, 1) + (0 if self.preactivation else 2 * outputs)
        last = self.widths[-1] * self.expansion
        return found + (2 * last if self.preactivation else 0) + self.head(last)


class Block(nn.Module):
    """Two or three convolutions beside a shortcut."""

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.config, self.stride = config, stride
        convolutions = config.convolutions(inputs, width, stride)
        self.count, outputs = len(convolutions), width * config.expansion
        for index, (source, target, kernel, step) in enumerate(convolutions, 1):
            self.add_module(f"conv{index}", convolution(source, target, kernel, step))
            self.add_module(f"bn{index}", nn.BatchNorm2d(source if config.preactivation else target))
        self.downsample: nn.Sequential | None = None
        if config.projected(inputs, width, stride):
            norm = [] if config.preactivation else [nn.BatchNorm2d(outputs)]
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), *norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        y, early = x, self.config.preactivation
        for index in range(1, self.count + 1):
            conv: Any = self._modules[f"conv{index}"]
            norm: Any = self._modules[f"bn{index}"]
            if early:
                y = F.relu(norm(y))
                if index == 1 and self.downsample is not None:
                    x = y
            if index == 2 and self.config.dropout:
                y = F.dropout(y, self.config.dropout, self.training)
            y = conv(y) if early else norm(conv(y))
            if not early and index < self.count:
                y = F.relu(y)
        y = self._joined(y, x)
        return y if early else F.relu(y)

    def _joined(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The branch plus the channels of the shortcut that are kept."""
        if self.downsample is not None:
            return y + self.downsample(x)
        kept = min(self.config.kept(y.shape[1]), x.shape[1])
        if not kept:
            return y
        x = x[:, :kept, :: self.stride, :: self.stride]
        return y + F.pad(x, (0, 0, 0, 0, 0, y.shape[1] - kept))


@method(
    "resnet",
    family="shape",
    source="arXiv:1512.03385",
    title="Deep Residual Learning for Image Recognition",
    mechanism="convolutions whose blocks add to what they read; wide, pre-activated, or plain with the same parameters",
    cost="a projection where the shape changes, or none with padded shortcuts",
)
class ResNet(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> ResNet(ResNetConfig(blocks=(1, 1), width=8))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ResNetConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        large = config.stem == "large"
        with seeded(seed):
            self.conv1 = convolution(config.channels, config.width, 7 if large else 3, 2 if large else 1)
            self.bn1 = nn.Identity() if config.preactivation else nn.BatchNorm2d(config.width)
            for index, stage in enumerate(config.plan(), 1):
                self.add_module(f"layer{index}", nn.Sequential(*(Block(config, *each) for each in stage)))
            last = config.widths[-1] * config.expansion
            self.bn = nn.BatchNorm2d(last) if config.preactivation else nn.Identity()
            self.fc = nn.Linear(last, config.classes)
            initialise(self)
        if config.zero_last:
            for block in (module for module in self.modules() if isinstance(module, Block)):
                nn.init.zeros_(block.get_parameter(f"{'conv' if config.preactivation else 'bn'}{block.count}.weight"))

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, D, H / 2^halvings, W / 2^halvings)."""
        x, early = self.conv1(images), self.config.preactivation
        x = x if early else F.relu(self.bn1(x))
        x = F.max_pool2d(x, 3, 2, 1) if self.config.stem == "large" else x
        for index in range(1, len(self.config.blocks) + 1):
            x = self.get_submodule(f"layer{index}")(x)
        return F.relu(self.bn(x)) if early else x

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        return self.fc(self.features(images).mean(dim=(-2, -1)))
