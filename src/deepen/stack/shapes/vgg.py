"""VGG: a plain stack of 3x3 convolutions, a pool after each stage, and three linear maps.

    x' = relu(conv(x) + b)             n times, then a maximum over 2 x 2; no shortcut, no norm

    x ── conv ── relu ── conv ── relu ── pool ── conv ── ...

The control of this family: its depth changes with all else fixed. A convolution that begins as the identity after a
relu changes nothing, so `grown` makes a deeper model that computes the same. The mean of the last map over a grid of
`grid` x `grid` feeds the linear maps; relus and dropout (0.5) lie between them. Parameters have the names of
torchvision.

Source: Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, arXiv:1409.1556.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import weights


class VGGConfig(ImageConfig):
    """What a VGG is built from.

    Attributes:
        convolutions: of each stage; (2, 2, 3, 3, 3) are 16 layers with the linear maps, (2, 2, 4, 4, 4) are 19.
        widths: of each stage.
        hidden: width between the linear maps.
        grid: height and width of what the linear maps read.
        dropout: between the linear maps.
    """

    convolutions: tuple[int, ...] = Field(default=(2, 2, 3, 3, 3), min_length=1)
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    hidden: int = Field(default=4096, ge=1)
    grid: int = Field(default=7, ge=1)
    dropout: float = Field(default=0.5, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.widths) != len(self.convolutions):
            raise ValueError(f"{len(self.widths)} widths for {len(self.convolutions)} stages; give one for each")
        if min(self.widths + self.convolutions) < 1:
            raise ValueError("every stage needs a convolution and a width")
        return self

    @property
    def halvings(self) -> int:
        return len(self.convolutions)

    def plan(self) -> list[list[tuple[int, int]]]:
        """Inputs and outputs of each convolution of each stage."""
        edges = pairwise((self.channels, *self.widths))
        return [
            [(inputs if not index else outputs, outputs) for index in range(count)]
            for (inputs, outputs), count in zip(edges, self.convolutions, strict=True)
        ]

    @property
    def parameters(self) -> int:
        found = sum(weights(i, o) + o for stage in self.plan() for i, o in stage)
        read = self.widths[-1] * self.grid**2
        return found + (read + 1) * self.hidden + (self.hidden + 1) * self.hidden + self.head(self.hidden)


@method(
    "vgg",
    family="shape",
    source="arXiv:1409.1556",
    title="Very Deep Convolutional Networks for Large-Scale Image Recognition",
    mechanism="a plain stack of 3x3 convolutions, without shortcuts or norms",
    cost="the control: nothing beside its convolutions; most parameters are in the linear maps",
)
class VGG(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> config = VGGConfig(convolutions=(1, 1), widths=(4, 8), hidden=16, grid=2)
        >>> VGG(config)(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: VGGConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        parts: list[nn.Module] = []
        with seeded(seed):
            for stage in config.plan():
                for inputs, outputs in stage:
                    parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                parts.append(nn.MaxPool2d(2))
            self.features = nn.Sequential(*parts)
            drop, hidden = config.dropout, config.hidden
            first = nn.Linear(config.widths[-1] * config.grid**2, hidden)
            between = [nn.ReLU(), nn.Dropout(drop), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(drop)]
            self.classifier = nn.Sequential(first, *between, nn.Linear(hidden, config.classes))
            initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        return self.classifier(F.adaptive_avg_pool2d(self.features(images), self.config.grid).flatten(1))

    @property
    def convolutions(self) -> list[nn.Conv2d]:
        """All of them, in order."""
        return [module for module in self.features if isinstance(module, nn.Conv2d)]


@torch.no_grad()
def grown(model: VGG, convolutions: tuple[int, ...]) -> VGG:
    """A deeper model that computes the same: each stage gets identity convolutions at its end.

    Args:
        model: stays as it is.
        convolutions: of each stage, at least as many as it has.

    Raises:
        UsageError: another number of stages, or a stage that would lose a convolution.
    """
    old = model.config.convolutions
    if len(convolutions) != len(old) or any(new < had for new, had in zip(convolutions, old, strict=True)):
        raise UsageError(f"stages of {old} convolutions cannot grow to {convolutions}; give as many or more for each")
    larger = VGG(model.config.model_copy(update={"convolutions": convolutions}), seed=None)
    source, target = iter(model.convolutions), iter(larger.convolutions)
    for had, has in zip(old, convolutions, strict=True):
        for index in range(has):
            layer = next(target)
            if index < had:
                layer.load_state_dict(next(source).state_dict())
            else:
                nn.init.dirac_(layer.weight)
    larger.classifier.load_state_dict(model.classifier.state_dict())
    return larger.train(model.training).to(model.convolutions[0].weight)
