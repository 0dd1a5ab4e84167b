"""FractalNet: columns of different depth that meet in means, without shortcuts, and drop-path, which keeps some alone.

    f_1(z) = conv(z)          f_C+1(z) = join(f_C(f_C(z)), conv(z))          join: the mean of what is there

    z ─┬─ conv ── conv ─┬─ conv ── conv ─┬─ x'      column 1, the deepest: 2^(C-1) convolutions
       ├───── conv ─────┴───── conv ─────┤          column c: 2^(C-c)
       └────────────── conv ─────────────┘          column C: one

A convolution is conv BN relu. Joins that follow each other are one join of all their inputs. There are 2^C - 1
convolutions and, with N_1 = 1 and N_C+1 = N_C^2 + 1, N_C paths through a block.

Drop-path, in training, once for each minibatch (R: not for each image): `local`, every join drops each input at random
but keeps one at least; `global`, one column runs alone, the same in every block. A share of the minibatches is global.
What is dropped is not computed, and means over what is kept need no factor outside of training. One column can run
alone at any time, the deepest of them for the best answer, a shallow one for a quick one.

Source: Larsson et al., FractalNet: Ultra-Deep Neural Networks without Residuals, arXiv:1605.07648.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import Unit, unit


class FractalNetConfig(ImageConfig):
    """What a FractalNet is built from.

    Attributes:
        widths: of each block, which is followed by a maximum over 2 x 2.
        columns: C.
        drop: the probability of local drop-path, for each input of a join.
        single: the share of minibatches that train one column alone.
    """

    widths: tuple[int, ...] = Field(default=(64, 128, 256, 512, 512), min_length=1)
    columns: int = Field(default=3, ge=1, le=8)
    drop: float = Field(default=0.15, ge=0, lt=1)
    single: float = Field(default=0.5, ge=0, le=1)

    @property
    def halvings(self) -> int:
        return len(self.widths)

    @property
    def parameters(self) -> int:
        first, all_ = self.columns, 2**self.columns - 1
        edges = pairwise((self.channels, *self.widths))
        blocks = sum(first * unit(i, o) + (all_ - first) * unit(o, o) for i, o in edges)
        return blocks + self.head(self.widths[-1])


def kept(inputs: Sequence[int], drop: float) -> list[int]:
    """Those inputs of a join that are not dropped; one of them, at random, where all would be."""
    if not drop or len(inputs) == 1:
        return list(inputs)
    draws = torch.rand(len(inputs) + 1).tolist()
    chosen = [each for each, draw in zip(inputs, draws) if draw >= drop]
    return chosen or [inputs[int(draws[-1] * len(inputs))]]


class Fractal(nn.Module):
    """One block of C columns."""

    def __init__(self, inputs: int, outputs: int, columns: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(
            nn.Sequential(*(Unit(outputs if step else inputs, outputs) for step in range(2 ** (columns - column - 1))))
            for column in range(columns)
        )

    def forward(self, z: torch.Tensor, only: int | None = None, drop: float = 0.0) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W), of one column (from 1) or of all, whose joins may drop inputs."""
        count = len(self.columns)
        # what the next convolution of each column reads
        read = [z] * count
        for step in range(1, 2 ** (count - 1) + 1):
            ending = [column for column in range(count) if step % 2**column == 0 and only in (None, column + 1)]
            if not ending:
                continue
            outputs = [self._convolution(column, step)(read[column]) for column in kept(ending, drop)]
            joined = reduce(torch.add, outputs) / len(outputs)
            for column in ending:
                read[column] = joined
        return read[0 if only is None else only - 1]

    def _convolution(self, column: int, step: int) -> nn.Module:
        """The one that ends at this step."""
        return self.get_submodule(f"columns.{column}.{step // 2**column - 1}")


@method(
    "fractalnet",
    family="shape",
    source="arXiv:1605.07648",
    title="FractalNet: Ultra-Deep Neural Networks without Residuals",
    mechanism="columns of 1, 2, 4 .. convolutions that meet in means; drop-path trains each to work alone",
    cost="2^C - 1 convolutions for a depth of 2^(C-1); a column alone costs its own",
)
class FractalNet(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator. Drop-path draws from torch's generator.

    Example:
        >>> model = FractalNet(FractalNetConfig(widths=(4, 8), columns=3)).eval()
        >>> model(torch.zeros(2, 3, 8, 8)).shape, model(torch.zeros(2, 3, 8, 8), column=1).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
    """

    def __init__(self, config: FractalNetConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            edges = pairwise((config.channels, *config.widths))
            self.blocks = nn.ModuleList(Fractal(inputs, outputs, config.columns) for inputs, outputs in edges)
            self.head = nn.Linear(config.widths[-1], config.classes)
            initialise(self)

    def forward(self, images: torch.Tensor, column: int | None = None) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Args:
            images: to classify.
            column: runs this one alone, from 1, the deepest, to C; None runs all, with drop-path in training.

        Raises:
            UsageError: images that do not fit, or no such column.
        """
        config, drop = self.config, 0.0
        config.check(images)
        self._known(column)
        if self.training and column is None:
            if config.single and float(torch.rand(())) < config.single:
                column = int(torch.randint(config.columns, ())) + 1
            else:
                drop = config.drop
        x = images
        for block in self.blocks:
            x = F.max_pool2d(block(x, column, drop), 2)
        return self.head(x.mean(dim=(-2, -1)))

    def extract(self, column: int) -> nn.Sequential:
        """One column as a plain net of its own; the parts are shared with this model.

        Raises:
            UsageError: no such column.
        """
        self._known(column)
        parts: list[nn.Module] = []
        for block in self.blocks:
            parts += [block.get_submodule(f"columns.{column - 1}"), nn.MaxPool2d(2)]
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.head)

    def _known(self, column: int | None) -> None:
        if column is not None and not 1 <= column <= self.config.columns:
            raise UsageError(f"no column {column}; there are 1, the deepest, to {self.config.columns}")
