"""ProRes: updates of Pre-LN are warmed up over training, those of early blocks first.

    x' = x + a(l, t) F(norm(x))          block l = 1 .. L, step of training t, base T steps

    x ──┬── norm ── F ── (x a) ── + ── x'
        └─────────────────────────┘

    m = min(t / (T l), 1)                c = (t - T (l - 1)) / T, kept between 0 and 1

    linear         m                     stagewise-0       c
    linear-sqrt    sqrt(m)               stagewise-L       c (1 - 1/L) + 1/L
    linear-square  m^2                   stagewise-sqrt-l  c (1 - 1/sqrt(l)) + 1/sqrt(l)
    equal          min(t / T, 1)         fixed-L           1/L
    reverse        m of l = L - l + 1    fixed-sqrt-L      1/sqrt(L)
                                         fixed-sqrt-l      1/sqrt(l)

Blocks are visits, every turn of a loop counted (R). There are no parameters. The step is saved with the model, and
outside of training the factors of that step hold; `set_step` moves it. The warm-up takes T L steps.

Source: Chen et al., ProRes, arXiv:2603.05369.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field

from deepen.errors import UsageError
from deepen.program.site import Site
from deepen.registry import method
from deepen.sublayers.contract import Read
from deepen.wiring.base import Norm, Shape, Wiring

Schedule: TypeAlias = Literal[
    "linear", "linear-sqrt", "linear-square", "equal", "reverse",
    "stagewise-0", "stagewise-L", "stagewise-sqrt-l", "fixed-L", "fixed-sqrt-L", "fixed-sqrt-l",
]  # fmt: skip


def factor(schedule: Schedule, step: torch.Tensor, block: int, blocks: int, base: int) -> torch.Tensor:
    """a(l, t), a scalar in single precision.

    Args:
        schedule: how it grows.
        step: t, a scalar.
        block: l, from 1.
        blocks: L.
        base: T, in steps.
    """
    kind, _, form = schedule.partition("-")
    t = step.float()
    floor = {"": 0.0, "0": 0.0, "L": 1 / blocks, "sqrt-L": blocks**-0.5, "sqrt-l": block**-0.5}
    if kind == "fixed":
        return torch.full_like(t, floor[form])
    if kind == "stagewise":
        return ((t - base * (block - 1)) / base).clamp(0, 1) * (1 - floor[form]) + floor[form]
    length = {"linear": block, "equal": 1, "reverse": blocks - block + 1}[kind]
    return (t / (base * length)).clamp(max=1) ** {"": 1.0, "sqrt": 0.5, "square": 2.0}[form]


@method(
    "prores",
    family="wiring",
    source="arXiv:2603.05369",
    title="ProRes: Progressive Residual Warm-up",
    mechanism="x + a(l, t) F(norm(x)), a grows to 1 over training, early blocks first",
    cost="a multiply a channel and site",
)
class ProRes(Wiring):
    """Pre-LN whose updates are multiplied by a schedule of the training step.

    Args:
        shape: what it is built for.
        schedule: how the factors grow.
        base: T, in steps.
    """

    marks: ClassVar[Mapping[str, str]] = {
        "C": "the schedules, and that both parts of a block share a factor",
        "N": "the table of factors, the embedding at step 0, Pre-LN after the warm-up",
        "R": "blocks are visits, turns of loops included; the other norm positions of the paper are not built",
    }

    step: torch.Tensor

    def __init__(
        self, shape: Shape, *, schedule: Schedule = "linear", base: Annotated[int, Field(ge=1)] = 1000
    ) -> None:
        super().__init__(shape)
        self.schedule: Schedule = schedule
        self.base = base
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def reset(self) -> None:
        self.step.zero_()

    def set_step(self, step: int) -> None:
        if step < 0:
            raise UsageError(f"the step of training is at least 0, not {step}")
        self.step.fill_(step)

    def constants(self) -> Mapping[str, str]:
        words = "each factor follows from the place of a visit among all"
        return {"places": words, "visits": words}

    def write(self, state: torch.Tensor, site: Site, read: Read, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        depth = self.shape.depth
        a = factor(self.schedule, self.step, depth.places[site.index] + 1, depth.visits, self.base)
        return state + a.to(y.dtype) * y
