"""ELAN, efficient layer aggregation network: short paths to every layer, however many are stacked.

    a = A x     b_0 = B x     b_i = conv(.. conv(b_i-1))     y = W [a; b_0; b_1; ..; b_n]

    x ─┬─ A ───────────────────────────────────┬─ W ── y
       └─ B ─┬─ conv conv ─┬─ conv conv ─┬─ .. ┤
             └─────────────┴─────────────┴─────┘

n stacks of m convolutions 3x3; A, B and W are 1x1; all are conv BN relu. The shortest path from y to any layer of a
stage passes at most m + 1 convolutions of it, whatever n is; in the plain stage of the same convolutions, up to
n m + 2. The longest path passes n m + 2. Between stages lies a maximum over 2 x 2 (R).

Source: Wang et al., Designing Network Design Strategies Through Gradient Path Analysis, arXiv:2211.04800; Wang et al.,
YOLOv7, arXiv:2207.02696.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import Unit, unit


class ELANConfig(ImageConfig):
    """What an ELAN is built from.

    Attributes:
        width: of the stem.
        widths: of the ends of each stage; a stage has half the size of the one before.
        stacks: n.
        convolutions: m, of each stack.
        narrow: how many times narrower than its end a stage is inside.
    """

    width: int = Field(default=32, ge=1)
    widths: tuple[int, ...] = Field(default=(128, 256, 512), min_length=1)
    stacks: int = Field(default=2, ge=1)
    convolutions: int = Field(default=2, ge=1)
    narrow: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.widths) < self.narrow:
            raise ValueError(f"a stage of width {min(self.widths)} cannot be {self.narrow} times narrower inside")
        return self

    @property
    def halvings(self) -> int:
        return len(self.widths) - 1

    @property
    def parameters(self) -> int:
        n, m = self.stacks, self.convolutions
        found = unit(self.channels, self.width)
        for inputs, outputs in pairwise((self.width, *self.widths)):
            inside = outputs // self.narrow
            found += 2 * unit(inputs, inside, 1) + n * m * unit(inside, inside) + unit((n + 2) * inside, outputs, 1)
        return found + self.head(self.widths[-1])


class Stage(nn.Module):
    """Stacks of convolutions, all of whose ends are merged."""

    def __init__(self, inputs: int, inside: int, outputs: int, stacks: int, convolutions: int) -> None:
        super().__init__()
        self.a, self.b = Unit(inputs, inside, 1), Unit(inputs, inside, 1)
        self.stacks = nn.ModuleList(
            nn.Sequential(*(Unit(inside, inside) for _ in range(convolutions))) for _ in range(stacks)
        )
        self.merge = Unit((stacks + 2) * inside, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W)."""
        ends = [self.a(x), self.b(x)]
        for stack in self.stacks:
            ends.append(stack(ends[-1]))
        return self.merge(torch.cat(ends, dim=1))


@method(
    "elan",
    family="shape",
    source="arXiv:2211.04800",
    title="Designing Network Design Strategies Through Gradient Path Analysis",
    mechanism="the ends of all stacks of convolutions are merged, so that every layer is near the end",
    cost="two 1x1 convolutions in and a wider one out, for each stage",
)
class ELAN(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> ELAN(ELANConfig(width=4, widths=(8, 16)))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ELANConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.stem = Unit(config.channels, config.width)
            self.stages = nn.ModuleList(
                Stage(inputs, outputs // config.narrow, outputs, config.stacks, config.convolutions)
                for inputs, outputs in pairwise((config.width, *config.widths))
            )
            self.head = nn.Linear(config.widths[-1], config.classes)
            initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        x = self.stem(images)
        for index, stage in enumerate(self.stages):
            x = stage(F.max_pool2d(x, 2) if index else x)
        return self.head(x.mean(dim=(-2, -1)))
