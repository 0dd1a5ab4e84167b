"""The linear maps of a layer that adapters stand beside, and tensors of a program's own parameters as recipes."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepen.checkpoint.family import Parts
from deepen.checkpoint.recipes import Alike, Described, Recipe, rounded
from deepen.checkpoint.sources import Source, TensorInfo
from deepen.sublayers.owned import SCALE, start

# The child of a layer list that holds what the program owns.
OWNED = "owned"


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
class Initial(Described):
    """The value that a tensor of a set starts with, the same each time; A is drawn from a seed made of its name.

    Attributes:
        name: of the tensor, such as `gate.0.1.bias`.
        info: its type and shape.
    """

    name: str
    info: TensorInfo

    def compute(self, source: Source) -> torch.Tensor:
        """The value, in memory of its own."""
        made = torch.empty(self.shape)
        start(made, self.name, torch.Generator().manual_seed(crc32(self.name.encode())))
        return rounded(made, self.dtype, self.name)


@dataclass(frozen=True, slots=True)
class Folded(Alike):
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

    def compute(self, source: Source) -> torch.Tensor:
        """The sum.

        Raises:
            CheckpointError: a finite value would overflow its type.
        """
        wide = torch.float64 if self.dtype in ("F32", "F64") else torch.float32
        matrix, a, b = (recipe.compute(source).to(wide) for recipe in (self.recipe, self.a, self.b))
        update = SCALE * b @ a
        return rounded(matrix + (update.T if self.turned else update), self.dtype, "folding an adapter")
