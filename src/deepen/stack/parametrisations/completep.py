"""CompleteP: the learning rate for AdamW stays when width and depth change, and no layer becomes lazy.

    x' = x + m_L^(-a) F(norm(x))           m_L = depth / base depth, m_N = width / base width

| parameter | std | factor | learning rate | weight decay | eps |
|---|---|---|---|---|---|
| matrices of layers | m_N^(-1/2) | | m_L^(a-1) / m_N | m_N | m_L^(-a) / m_N |
| output matrices | the same, and | m_L^(-a) | | | |
| biases and norms of layers | | | m_L^(a-1) | | m_L^(-a) / m_N |
| embedding, final norm | | | | | 1 / m_N |
| head | | 1 / m_N | | | |

a = 1 keeps the rate constant over depth; a = 1/2 is Depth-muP. At the base width and depth every multiplier is 1. What
wirings and programs own counts as biases of layers (R). A head that is the embedding has the embedding's rate and eps.

Source: Dey et al., Don't be lazy: CompleteP enables compute-efficient deep transformers, arXiv:2505.01618; how eps is
split, and the head's row, are from general knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from deepen.registry import method
from deepen.stack.parametrisation import Place, Record, Rule, Scale


def record(place: Place, *, deep: float, wide: float, alpha: float) -> Record:
    """The row of the table for a model `deep` times as deep and `wide` times as wide as the base."""
    rate, eps = deep ** (alpha - 1), deep**-alpha / wide
    match place.kind:
        case "matrix" | "output":
            forward = deep**-alpha if place.kind == "output" else 1.0
            return Record(init=wide**-0.5, forward=forward, lr=rate / wide, weight_decay=wide, eps=eps)
        case "vector" | "norm":
            return Record(lr=rate, eps=eps)
        case "embedding" | "final":
            return Record(eps=1 / wide)
        case "head":
            return Record(forward=1 / wide)


@method(
    "completep",
    family="parametrisation",
    source="arXiv:2505.01618",
    title="Don't be lazy: CompleteP enables compute-efficient deep transformers",
    mechanism="branches divided by the depth, rates of AdamW that do not depend on it",
    cost="D multiply-adds a site",
)
class CompleteP(Rule):
    """Rules for AdamW.

    Args:
        scale: of the model.
        alpha: the exponent a of depth.
        base_depth: blocks of the model whose rates are known.
        base_width: its width; None is the model's own.
    """

    recipes: ClassVar[Sequence[str]] = ("normal",)
    deep: ClassVar[bool] = True

    def __init__(
        self,
        scale: Scale,
        *,
        alpha: Annotated[float, Field(ge=0.5, le=1)] = 1.0,
        base_depth: Annotated[float, Field(gt=0)] = 1.0,
        base_width: Annotated[int | None, Field(ge=1)] = None,
    ) -> None:
        super().__init__(scale)
        self.alpha = alpha
        self.times_deep = scale.depth / base_depth
        self.times_wide = scale.width / (base_width or scale.width)

    def record(self, place: Place) -> Record:
        return record(place, deep=self.times_deep, wide=self.times_wide, alpha=self.alpha)
