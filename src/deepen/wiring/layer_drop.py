"""LayerDrop: in training whole layers are dropped at random, so that some can be left out afterwards.

    training          x' = x + b Attention(norm(x));  x'' = x' + b FeedForward(norm(x'))     b = 0 with probability p
    outside of it     Pre-LN, nothing is rescaled

    x ──┬── norm ── attention ── (x b) ── + ──┬── norm ── feed-forward ── (x b) ── + ── x''
        └─────────────────────────────────────┘ └──────────────────────────────────┘

The two sites of a visit share one draw for the batch; each turn of a loop draws for itself (R). `kept` says which
layers a shallower model has, and a program of these alone is that model. A dropped layer is multiplied by 0, not
skipped: no time is saved in training (R).

Source: Fan et al., Reducing Transformer Depth on Demand with Structured Dropout, arXiv:1909.11556.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from deepen.errors import UsageError
from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape
from deepen.wiring.stochastic_depth import Drawn, RandomDepth


def kept(layers: int, drop: float) -> list[int]:
    """The layers, from 0, that remain when every floor(1 / drop)-th is left out.

    Raises:
        UsageError: `drop` is not above 0 and at most 1/2, where no layer or every layer would go.
    """
    if not 0 < drop <= 0.5:
        raise UsageError(f"the share of layers to leave out is above 0 and at most 1/2, not {drop}")
    every = int(1 / drop)
    return [layer for layer in range(layers) if (layer + 1) % every]


@method(
    "layer-drop",
    family="wiring",
    source="arXiv:1909.11556",
    title="Reducing Transformer Depth on Demand with Structured Dropout",
    mechanism="whole layers dropped at random in training",
    cost="a multiply a channel and site in training; dropped layers are computed all the same",
)
class LayerDrop(RandomDepth):
    """Random layers in training.

    Args:
        shape: what it is built for.
        drop: the probability with which a layer is dropped.
    """

    equals = "Pre-LN outside of training"
    marks: ClassVar[Mapping[str, str]] = {
        "K": "the equation, one draw a layer, nothing rescaled, which layers remain",
        "N": "the share of layers that run, and that a model without the others is a program",
        "R": "turns of loops draw for themselves; dropped layers are computed",
    }

    def __init__(self, shape: Shape, *, drop: Annotated[float, Field(ge=0, lt=1)] = 0.2) -> None:
        super().__init__(shape, [1 - drop] * shape.visits, "batch")

    def write(self, state: Drawn, site: Site, read: Read, y: Tensor, norm: Norm) -> Drawn:
        factor = 1 if state.keeps is None else state.keeps[:, site.visit, None, None].to(y.dtype)
        return state._replace(x=state.x + factor * y)
