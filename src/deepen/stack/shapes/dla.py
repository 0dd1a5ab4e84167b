"""Deep layer aggregation: nodes learn how to merge what blocks compute, along depth and across stages.

    node          A(x_1 .. x_m) = relu(BN(W [x_1; ..; x_m]) [+ x_m])
    iterative     I(x_1) = x_1          I(x_1 .. x_m) = I(A(x_1, x_2), x_3 .. x_m)           shallow first
    hierarchical  T_n(x) = A(R_n-1, R_n-2 .. R_1, L_1, L_2)          L_1 = B(R_1)    L_2 = B(L_1)
                  R_n-1 = T_n-1(x)     R_m = T_m(R_m+1)              n = 1: R_1 = x

    x ── B ─┬─ B ─┬─ A ─┬─ B ─┬─ B ─┬─ A ── x'          T_2: four blocks, a node of two and one of three inputs
            └─────┘     │     └─────┤
                        └───────────┘

T_n holds 2^n blocks and 2^(n-1) nodes, and its last node reads n + 1 maps: a path of one block and n nodes leads
through it. B is a basic residual block. A stage is one T_n. Across stages either the last node of a stage also reads
what the stage began with (`root`, as in the paper's classifiers), or the ends of all stages, pooled to the size of the
last, are merged iteratively (`iterative`; R: the paper does so for dense predictions, and enlarges instead).

Source: Yu et al., Deep Layer Aggregation, arXiv:1707.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from deepen.registry import method
from deepen.stack.shapes.base import ImageConfig, initialise, seeded
from deepen.stack.shapes.convolution import Unit, unit


class DLAConfig(ImageConfig):
    """What a deep layer aggregation is built from.

    Attributes:
        depths: n of each stage; every stage but the first has half the size of the one before.
        widths: of each stage.
        width: of the stem.
        across: how stages are joined.
        residual: whether nodes add their last input.
        stem: `small`, a 3x3 convolution, or `large`: a 7x7 one, a 3x3 one and one of stride 2 and twice the width; the
            first stage then halves the size too.
    """

    depths: tuple[int, ...] = Field(default=(1, 2, 2, 1), min_length=1)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    width: int = Field(default=16, ge=1)
    across: Literal["root", "iterative"] = "root"
    residual: bool = False
    stem: Literal["small", "large"] = "small"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.widths) != len(self.depths):
            raise ValueError(f"{len(self.widths)} widths for {len(self.depths)} stages; give one for each")
        if min(self.widths + self.depths) < 1:
            raise ValueError("every stage needs a depth and a width")
        return self

    @property
    def halvings(self) -> int:
        return len(self.depths) - 1 + (2 if self.stem == "large" else 0)

    def plan(self) -> list[tuple[int, int, int, int, int]]:
        """Depth, inputs, outputs, stride, and the channels that the last node reads beside, of each stage."""
        inputs = self.width if self.stem == "small" else 2 * self.width
        found = []
        for stage, (depth, outputs) in enumerate(zip(self.depths, self.widths, strict=True)):
            stride = 2 if stage or self.stem == "large" else 1
            found.append((depth, inputs, outputs, stride, inputs if stage and self.across == "root" else 0))
            inputs = outputs
        return found

    @property
    def parameters(self) -> int:
        w = self.width
        found = unit(self.channels, w) if self.stem == "small" else unit(self.channels, w, 7) + unit(w, w)
        found += unit(w, 2 * w) if self.stem == "large" else 0
        found += sum(_tree(depth, inputs, outputs, beside) for depth, inputs, outputs, _, beside in self.plan())
        if self.across == "iterative":
            found += sum(unit(one + two, two, 1) for one, two in pairwise(self.widths))
        return found + self.head(self.widths[-1])


def _tree(depth: int, inputs: int, outputs: int, beside: int) -> int:
    """Parameters of T_n."""
    if depth > 1:
        return _tree(depth - 1, inputs, outputs, 0) + _tree(depth - 1, outputs, outputs, beside + outputs)
    projection = unit(inputs, outputs, 1) if inputs != outputs else 0
    return unit(inputs, outputs) + 3 * unit(outputs, outputs) + projection + unit(2 * outputs + beside, outputs, 1)


class Node(nn.Module):
    """A: merges maps of the same size."""

    def __init__(self, inputs: int, outputs: int, residual: bool) -> None:
        super().__init__()
        self.unit, self.residual = Unit(inputs, outputs, 1, relu=False), residual

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Maps (B, c_i, H, W), the deepest last -> (B, outputs, H, W)."""
        y = self.unit(torch.cat(tuple(maps), dim=1))
        return F.relu(y + maps[-1] if self.residual else y)


class Block(nn.Module):
    """B: two convolutions beside a shortcut, which is pooled and projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = Unit(inputs, outputs, 3, stride), Unit(outputs, outputs, relu=False)
        self.stride = stride
        self.project = Unit(inputs, outputs, 1, relu=False) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        return F.relu(self.two(self.one(x)) + self.project(pooled(x, self.stride)))


class Tree(nn.Module):
    """T_n; `beside` channels of other maps enter its last node."""

    def __init__(self, depth: int, inputs: int, outputs: int, stride: int, beside: int, residual: bool) -> None:
        super().__init__()
        if depth > 1:
            self.left: nn.Module = Tree(depth - 1, inputs, outputs, stride, 0, residual)
            self.right: nn.Module = Tree(depth - 1, outputs, outputs, 1, beside + outputs, residual)
            self.node = None
        else:
            self.left, self.right = Block(inputs, outputs, stride), Block(outputs, outputs, 1)
            self.node = Node(2 * outputs + beside, outputs, residual)

    def forward(self, x: torch.Tensor, beside: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        left = self.left(x)
        if self.node is None:
            return self.right(left, (*beside, left))
        return self.node((*beside, left, self.right(left)))


class Iterative(nn.Module):
    """I: merges maps of one size and of these widths, shallow first, to the width of the last."""

    def __init__(self, widths: Sequence[int], residual: bool) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(Node(one + two, two, residual) for one, two in pairwise(widths))

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Maps (B, c_i, H, W), the deepest last -> (B, c_m, H, W)."""
        x = maps[0]
        for node, other in zip(self.nodes, maps[1:], strict=True):
            x = node((x, other))
        return x


def pooled(x: torch.Tensor, stride: int) -> torch.Tensor:
    """The maximum over squares, of the size that a convolution of this stride gives."""
    return x if stride == 1 else F.max_pool2d(x, stride, ceil_mode=True)


@method(
    "deep-layer-aggregation",
    family="shape",
    source="arXiv:1707.06484",
    title="Deep Layer Aggregation",
    mechanism="nodes merge blocks in a tree, and stages one after the other, by learned 1x1 convolutions",
    cost="a 1x1 convolution a node, one node for two blocks; the maps it reads stay alive",
)
class DLA(nn.Module):
    """A classifier of images.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> DLA(DLAConfig(depths=(1, 2), widths=(4, 8), width=4))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: DLAConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        w, large = config.width, config.stem == "large"
        with seeded(seed):
            stem = [Unit(config.channels, w, 7), Unit(w, w), Unit(w, 2 * w, 3, 2)] if large else []
            self.stem = nn.Sequential(*stem) if large else Unit(config.channels, w)
            self.stages = nn.ModuleList(Tree(*each, config.residual) for each in config.plan())
            self.across = Iterative(config.widths, config.residual) if config.across == "iterative" else None
            self.head = nn.Linear(config.widths[-1], config.classes)
            initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, classes).

        Raises:
            UsageError: images that do not fit.
        """
        self.config.check(images)
        x, ends = self.stem(images), []
        for tree, (_, _, _, stride, beside) in zip(self.stages, self.config.plan(), strict=True):
            x = tree(x, (pooled(x, stride),) if beside else ())
            ends.append(x)
        if self.across is not None:
            x = self.across([pooled_to(end, x) for end in ends])
        return self.head(x.mean(dim=(-2, -1)))


def pooled_to(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Halved by maxima until it has the height of `like`."""
    while x.shape[-2] > like.shape[-2]:
        x = pooled(x, 2)
    return x
