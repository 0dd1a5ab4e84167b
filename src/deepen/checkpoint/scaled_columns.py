"""The query third of a fused attention projection, scaled: how GPT-2's division by the layer number is folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.checkpoint.recipes import Alike, Recipe
from deepen.checkpoint.sources import ByteRange, Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ScaledQuery(Alike):
    """A fused projection [d, 3d] or bias [3d], stored query first, with its query scaled by `factor`."""

    recipe: Recipe
    factor: float

    def range(self, source: Source) -> ByteRange | None:
        return self.recipe.range(source) if self.factor == 1 else None

    def compute(self, source: Source) -> torch.Tensor:
        tensor = self.recipe.compute(source)
        query = tensor[..., : tensor.shape[-1] // 3]
        query.copy_(query.float() * self.factor)
        return tensor
