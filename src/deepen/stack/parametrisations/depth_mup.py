"""Depth-muP: branches divided by the root of the depth, and rates that keep each step's change of the stream.

    x' = x + a m^(-1/2) F(norm(x))         m = depth / base depth

| optimiser | factor of a branch | learning rate in layers |
|---|---|---|
| Adam, AdamW and others that take signs | a m^(-1/2) | m^(-1/2) |
| SGD | a m^(-1/2) | 1 |

Initial values do not depend on depth. A step of SGD is smaller by another root of the depth, since its gradient went
through the factor; Adam's has no such scale and needs the rate. With a base width the width part is muP's for Adam, as
in `completep`. With branches of two matrices or more no choice of exponents is best in every respect.

Source: Yang et al., Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks, arXiv:2310.02244.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.parametrisation import Place, Record, Rule, Scale
from deepen.stack.parametrisations.completep import record


@method(
    "depth-mup",
    family="parametrisation",
    source="arXiv:2310.02244",
    title="Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks",
    mechanism="branches divided by the root of the depth, and rates of Adam too",
    cost="D multiply-adds a site",
)
class DepthMuP(Rule):
    """Rules for one optimiser.

    Args:
        scale: of the model.
        a: factor of every branch.
        base_depth: blocks of the model whose rates are known.
        base_width: its width; None is the model's own.
        optimiser: what the rates are for.
    """

    recipes: ClassVar[Sequence[str]] = ("normal", "small")
    deep: ClassVar[bool] = True

    def __init__(
        self,
        scale: Scale,
        *,
        a: Annotated[float, Field(gt=0)] = 1.0,
        base_depth: Annotated[float, Field(gt=0)] = 1.0,
        base_width: Annotated[int | None, Field(ge=1)] = None,
        optimiser: Literal["adamw", "sgd"] = "adamw",
    ) -> None:
        super().__init__(scale)
        if optimiser == "sgd" and base_width is not None:
            raise UsageError(
                "parametrisation depth-mup: the width part is that of Adam; leave base_width out for sgd, or use "
                "meta-principled"
            )
        self.a, self.optimiser = a, optimiser
        self.times_deep = scale.depth / base_depth
        self.times_wide = scale.width / (base_width or scale.width)

    def record(self, place: Place) -> Record:
        found = record(place, deep=self.times_deep, wide=self.times_wide, alpha=0.5)
        if place.kind == "output":
            found = replace(found, forward=self.a * found.forward)
        return replace(found, lr=1.0, eps=1.0) if self.optimiser == "sgd" else found
