"""A feed-forward of two maps: y = W_down form(W_up u)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Neuron, Place, Sizes
from deepen.sublayers.ffn.forms import FORMS, Form, Name
from deepen.sublayers.linear import linear


class Dense(FeedForward):
    """Two maps around the form that a class names; one matrix holds the rows of the gate and of the values."""

    name: ClassVar[Name]

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.form: Form = FORMS[self.name]
        self.up = nn.Linear(sizes.width, self.form.rows(sizes.hidden), bias=sizes.bias)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=sizes.bias)

    @classmethod
    def usual_hidden(cls, width: int, **options: Any) -> float:
        return FORMS[cls.name].times * width

    def forward(self, read: Read, context: Context) -> Out:
        hidden = self.form(linear(self, "up", read.u, context), self.sizes.gelu)
        return Out(linear(self, "down", hidden, context))

    def neurons(self) -> Sequence[Neuron]:
        hidden = self.sizes.hidden
        reads: list[tuple[Place, ...]] = []
        for index in range(hidden):
            rows = range(index, self.form.rows(hidden), hidden)
            names = ("up.weight", "up.bias") if self.sizes.bias else ("up.weight",)
            reads.append(tuple((name, (row,)) for row in rows for name in names))
        return [Neuron(each, (("down.weight", (slice(None), index)),)) for index, each in enumerate(reads)]
