"""The parameters that a program owns, as modules: what they compute, and the values they start with.

| kind | tensors | computes | starts with |
|---|---|---|---|
| `lora` | A [r, in], B [out, r] for each linear map | (alpha / r) B A x, alpha = 2 r | A uniform (Kaiming), B = 0 |
| `emb` | value [d] | x + e | e = 0 |
| `norm` | gain [d] | x / rms(x) g | g = 1, which is not the identity |
| `gate=scalar`, `vector` | value [1], [d] | the factor g of x + g (P(x) - x) | g = 1 |
| `gate=token` | weight [d], bias [1] | the factor sigmoid(w x + b), one a token | w = 0, b = 4 |
| `inject=LABEL:concat` | weight [d, 2d] | W [x; s], s the stream at the label | W = [I 0] |

The rank of a matrix is r, at most its smaller side. Shapes: d is the width of the stream.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685; the rest is deepen's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.family import Parts
from deepen.checkpoint.recipes import Recipe, rounded
from deepen.checkpoint.sources import ByteRange, Source, TensorInfo
from deepen.program import Own

# The child of a layer list that holds what the program owns.
OWNED = "owned"
# alpha / r
SCALE = 2.0
EPS = 1e-6
OPEN = 4.0


class Lora(nn.Module):
    """The adapter of one linear map of `reads` to `gives` values."""

    def __init__(self, rank: int, reads: int, gives: int) -> None:
        super().__init__()
        rank = min(rank, reads, gives)
        self.A = nn.Parameter(torch.empty(rank, reads))
        self.B = nn.Parameter(torch.empty(gives, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], what is added to the map's own result."""
        read = functional.linear(x.to(self.A.dtype), self.A)
        return (SCALE * functional.linear(read, self.B)).to(x.dtype)

    def update(self) -> torch.Tensor:
        """What is added to the matrix, [out, in]."""
        return SCALE * self.B @ self.A


class Embedding(nn.Module):
    """A vector that is added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value.to(x.dtype)


class Norm(nn.Module):
    """The stream divided by its root mean square, times a gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.gain.to(x.dtype)


class Factor(nn.Module):
    """The same factor for every token, one for the stream or one for each of its values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.to(x.dtype)


class TokenFactor(nn.Module):
    """A factor that each token decides, [..., d] -> [..., 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(functional.linear(x, self.weight[None].to(x.dtype), self.bias.to(x.dtype)))


class Joined(nn.Module):
    """A linear map of the stream beside a recorded one, [..., 2d] -> [..., d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


def branches(modules: Mapping[str, nn.Module]) -> nn.Module:
    """One module with others at dotted paths below it."""
    root = nn.Module()
    for path, module in modules.items():
        *above, name = path.split(".")
        at = root
        for step in above:
            if step not in at._modules:
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        at.add_module(name, module)
    return root


def stream_module(own: Own, width: int) -> nn.Module | None:
    """The module of a set other than `lora`; None where it has no parameters."""
    match own.kind, own.value:
        case "emb", _:
            return Embedding(width)
        case "norm", _:
            return Norm(width)
        case "gate", "token":
            return TokenFactor(width)
        case "gate", kind:
            return Factor(1 if kind == "scalar" else width)
        case "inject", (_, "concat"):
            return Joined(width)
        case _:
            return None


def label(path: str) -> str:
    """What the adapter of the map at `path` is called; no name that PEFT would take for the map itself."""
    return path.replace(".", "_")


def linear_maps(layer: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """The linear maps of a layer by path."""
    return {path: module for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def part_maps(layer: nn.Module, parts: Parts, letters: str) -> dict[str, nn.Linear | Conv1D]:
    """The linear maps of some parts of a layer by path."""
    feed_forward = feed_forward_names(layer, parts)
    return {
        path: module
        for path, module in linear_maps(layer).items()
        if ("f" if path.split(".")[0] in feed_forward else "a") in letters
    }


def feed_forward_names(layer: nn.Module, parts: Parts) -> set[str]:
    """The submodules that make up the feed-forward; none where a layer is one piece."""
    return {name for name in parts.feed_forward if name in layer._modules} if parts.kind != "whole" else set()


@dataclass(frozen=True, slots=True)
class Initial:
    """The value that a tensor of a set starts with, the same each time; A is drawn from a seed made of its name.

    Attributes:
        name: of the tensor, such as `gate.0.1.bias`.
        info: its type and shape.
    """

    name: str
    info: TensorInfo

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def range(self, source: Source) -> ByteRange | None:
        return None

    def compute(self, source: Source) -> torch.Tensor:
        """The value, in memory of its own."""
        kind, leaf = self.name.split(".")[0], self.name.rpartition(".")[2]
        made = torch.zeros(self.shape)
        if kind == "lora" and leaf == "A":
            bound = 1 / sqrt(self.shape[1])
            made.uniform_(-bound, bound, generator=torch.Generator().manual_seed(crc32(self.name.encode())))
        elif (kind, leaf) in (("norm", "gain"), ("gate", "value")):
            made.fill_(1.0)
        elif (kind, leaf) == ("gate", "bias"):
            made.fill_(OPEN)
        elif kind == "inject":
            made.fill_diagonal_(1.0)
        return rounded(made, self.dtype, self.name)


@dataclass(frozen=True, slots=True)
class Folded:
    """A matrix with its adapter added, W + (alpha / r) B A, computed wide and rounded once.

    Attributes:
        recipe: W [out, in], or [in, out] where `turned`.
        a: A [r, in].
        b: B [out, r].
        turned: the matrix is that of a Conv1D.
    """

    recipe: Recipe
    a: Recipe
    b: Recipe
    turned: bool

    @property
    def dtype(self) -> str:
        return self.recipe.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape

    def range(self, source: Source) -> ByteRange | None:
        return None

    def compute(self, source: Source) -> torch.Tensor:
        """The sum.

        Raises:
            CheckpointError: a finite value would overflow its type.
        """
        wide = torch.float64 if self.dtype in ("F32", "F64") else torch.float32
        matrix, a, b = (recipe.compute(source).to(wide) for recipe in (self.recipe, self.a, self.b))
        update = SCALE * b @ a
        return rounded(matrix + (update.T if self.turned else update), self.dtype, "folding an adapter")
