"""DenseNet: each layer reads the channels of all layers before it in its block, and adds a few of its own.

    x_l = h([x_0, .., x_l-1])          h = BN relu conv1x1(4 g) BN relu conv3x3(g), or BN relu conv3x3(g)

    x_0 ─┬─ h ─ x_1 ─┬─ h ─ x_2 ─┬─ ...          [x_0 x_1 x_2 ..]: g more channels a layer
         └───────────┴───────────┴─ ...

Layer l of a block reads c_0 + g (l - 1) channels. Between blocks a transition, BN relu conv1x1 and a mean pool of
stride 2, keeps a share of the channels. Every block copies what it joins at each layer: memory grows with the square of
its layers. Parameters have the names of torchvision.

Source: Huang et al., Densely Connected Convolutional Networks, arXiv:1608.06993.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import convolution, weights


class DenseNetConfig(ImageConfig):
    """What a DenseNet is built from.

    Attributes:
        blocks: layers of each block.
        growth: g, the channels that a layer adds.
        width: c_0 of the first block.
        bottleneck: whether a 1x1 convolution to 4 g channels comes first.
        compression: the share of the channels that a transition keeps.
        stem: `small`, a 3x3 convolution, or `large`, a 7x7 one of stride 2, a norm and a pool of stride 2.
    """

    blocks: tuple[int, ...] = Field(default=(6, 12, 24, 16), min_length=1)
    growth: int = Field(default=12, ge=1)
    width: int = Field(default=24, ge=1)
    bottleneck: bool = True
    compression: float = Field(default=0.5, gt=0, le=1)
    stem: Literal["small", "large"] = "small"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.blocks) < 1:
            raise ValueError(f"every block needs a layer, got {self.blocks}")
        if min(self.entries) < 1:
            raise ValueError(f"a compression of {self.compression} leaves no channels; keep more of them")
        return self

    @property
    def halvings(self) -> int:
        return len(self.blocks) - 1 + (2 if self.stem == "large" else 0)

    @property
    def entries(self) -> tuple[int, ...]:
        """Channels that each block reads."""
        found = [self.width]
        for layers in self.blocks[:-1]:
            found.append(int((found[-1] + layers * self.growth) * self.compression))
        return tuple(found)

    @property
    def exits(self) -> tuple[int, ...]:
        """Channels that each block gives."""
        return tuple(entry + layers * self.growth for entry, layers in zip(self.entries, self.blocks, strict=True))

    def block(self, entry: int, layers: int) -> int:
        """Parameters of a block."""
        g, inside = self.growth, 4 * self.growth
        found = 0
        for inputs in range(entry, entry + layers * g, g):
            found += 2 * inputs
            found += weights(inputs, inside, 1) + 2 * inside + weights(inside, g) if self.bottleneck else 0
            found += 0 if self.bottleneck else weights(inputs, g)
        return found

    @property
    def parameters(self) -> int:
        found = weights(self.channels, self.width, 3 if self.stem == "small" else 7)
        found += 2 * self.width if self.stem == "large" else 0
        found += sum(self.block(entry, layers) for entry, layers in zip(self.entries, self.blocks, strict=True))
        for exit_, entry in zip(self.exits, self.entries[1:]):
            found += 2 * exit_ + weights(exit_, entry, 1)
        return found + 2 * self.exits[-1] + self.head(self.exits[-1])


class DenseLayer(nn.Module):
    """What a layer adds to the channels that it reads."""

    def __init__(self, inputs: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, 4 * growth, 1) if bottleneck else convolution(inputs, growth)
        self.norm2 = nn.BatchNorm2d(4 * growth) if bottleneck else None
        self.conv2 = convolution(4 * growth, growth) if bottleneck else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, growth, H, W)."""
        y = self.conv1(F.relu(self.norm1(x)))
        return y if self.norm2 is None or self.conv2 is None else self.conv2(F.relu(self.norm2(y)))


class DenseBlock(nn.Module):
    """Layers that read everything before them."""

    def __init__(self, entry: int, layers: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        for index in range(layers):
            self.add_module(f"denselayer{index + 1}", DenseLayer(entry + index * growth, growth, bottleneck))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, c, H, W) -> (B, c + layers growth, H, W), the first c channels as they were."""
        for layer in self.children():
            x = torch.cat([x, layer(x)], dim=1)
        return x


class Transition(nn.Module):
    """Fewer channels and half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = convolution(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / 2, W / 2)."""
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


@method(
    "densenet",
    family="shape",
    source="arXiv:1608.06993",
    title="Densely Connected Convolutional Networks",
    mechanism="a layer reads the channels of all before it and adds g of its own",
    cost="parameters, products and memory grow with the square of a block's layers",
)
class DenseNet(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> DenseNet(DenseNetConfig(blocks=(2, 2), growth=4, width=8))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: DenseNetConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        large = config.stem == "large"
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        with seeded(seed):
            parts["conv0"] = convolution(config.channels, config.width, 7 if large else 3, 2 if large else 1)
            if large:
                parts["norm0"] = nn.BatchNorm2d(config.width)
                parts["relu0"] = nn.ReLU()
                parts["pool0"] = nn.MaxPool2d(3, 2, 1)
            for index, (entry, layers) in enumerate(zip(config.entries, config.blocks, strict=True)):
                if index:
                    parts[f"transition{index}"] = Transition(config.exits[index - 1], entry)
                parts[f"denseblock{index + 1}"] = DenseBlock(entry, layers, config.growth, config.bottleneck)
            parts["norm5"] = nn.BatchNorm2d(config.exits[-1])
            self.features = nn.Sequential(parts)
            self.classifier = nn.Linear(config.exits[-1], config.classes)
            initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        return self.classifier(F.relu(self.features(images)).mean(dim=(-2, -1)))
