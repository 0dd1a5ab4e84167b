"""The meta-principled family for SGD: one number s between neural-tangent (0) and mean-field, that is muP, scaling (1).

| parameter | std | learning rate |
|---|---|---|
| matrices of layers | m^(-1/2) | m^(s-1) |
| head | m^(-(1+s)/2) | m^(-1) |
| embedding, biases, norms, what wirings own | | m^s |

m = width / base width. A step changes the function by O(1) for every s, and the hidden layers by width^((s-1)/2). How
much is learned beyond the tangent kernel goes with `strength` = depth / width^(1-s): keep it when both change. It has
no factor of depth, so it goes with any wiring. Norms and biases count as input weights (R). Derived here from the
abstract of the paper.

Source: Yaida, Meta-Principled Family of Hyperparameter Scaling Strategies, arXiv:2210.04909.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.parametrisation import Place, Record, Rule, Scale


def strength(depth: float, width: int, s: float) -> float:
    """How strongly a model of this shape learns representations, up to a constant."""
    return depth / width ** (1 - s)


@method(
    "meta-principled",
    family="parametrisation",
    source="arXiv:2210.04909",
    title="Meta-Principled Family of Hyperparameter Scaling Strategies",
    mechanism="rates of SGD and initial values by powers of the width, from tangent kernel to mean field",
    cost="nothing",
)
class MetaPrincipled(Rule):
    """Rules for SGD.

    Args:
        scale: of the model.
        s: where between neural-tangent and mean-field scaling.
        base_width: width of the model whose rates are known; None is the model's own.

    Raises:
        UsageError: a head that is the embedding, since the two have different rates.
    """

    recipes: ClassVar[Sequence[str]] = ("normal",)

    def __init__(
        self,
        scale: Scale,
        *,
        s: Annotated[float, Field(ge=0, le=1)] = 1.0,
        base_width: Annotated[int | None, Field(ge=1)] = None,
    ) -> None:
        super().__init__(scale)
        if scale.tied:
            raise UsageError(
                "parametrisation meta-principled: the embedding and the head have different rates; use tied: false"
            )
        self.s, self.optimiser = s, "sgd"
        self.times_wide = scale.width / (base_width or scale.width)

    def record(self, place: Place) -> Record:
        wide, s = self.times_wide, self.s
        match place.kind:
            case "matrix" | "output":
                return Record(init=wide**-0.5, lr=wide ** (s - 1))
            case "head":
                return Record(init=wide ** (-(1 + s) / 2), lr=1 / wide)
            case _:
                return Record(lr=wide**s)
