"""ListOps: nested lists of digits under maximum, minimum, median and sum modulo 10.

    [MAX 2 9 [MIN 4 7 ] 0 ]          9

The median of an even number of values is the mean of the two in the middle, rounded down.

Source: Nangia and Bowman, ListOps: A Diagnostic Dataset for Latent Tree Learning, arXiv:1804.06028.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from deepen.tasks.reasoning import DEEPER, LONGER, Question, Range, Reasoning, answered, between


def _median(values: Sequence[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


OPERATORS = {"[MAX": max, "[MIN": min, "[MED": _median, "[SM": lambda values: sum(values) % 10}
CLOSE = "]"


class ListOps(Reasoning):
    """Nested lists.

    Attributes:
        depth: lists inside of each other.
        deeper: those beyond training.
        arguments: values of a list.
        longer: values beyond training.
        nested: the share of values that are lists themselves, as long as the depth allows.
    """

    about: ClassVar[str] = "the value of nested lists under MAX, MIN, MED and SM"

    name: Literal["listops"] = "listops"
    depth: Range = (1, 3)
    deeper: Range = (4, 5)
    arguments: Range = (2, 3)
    longer: Range = (4, 5)
    nested: float = Field(default=0.3, ge=0, le=1)

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*map(str, range(10)), *OPERATORS, CLOSE, "=")

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        depth = between(drawn, self.deeper if part == DEEPER else self.depth)
        text, result = self._list(drawn, depth, self.longer if part == LONGER else self.arguments)
        return answered([*text, "="], [str(result)])

    def _list(self, drawn: np.random.Generator, depth: int, arguments: tuple[int, int]) -> tuple[list[str], int]:
        """A list of exactly this depth, and its value."""
        operator = list(OPERATORS)[drawn.integers(len(OPERATORS))]
        count = between(drawn, arguments)
        # one value goes down to the full depth
        deep = int(drawn.integers(count))
        text, values = [operator], []
        for place in range(count):
            if depth > 1 and (place == deep or drawn.random() < self.nested):
                inner = depth - 1 if place == deep else int(drawn.integers(1, depth))
                words, result = self._list(drawn, inner, arguments)
            else:
                result = int(drawn.integers(10))
                words = [str(result)]
            text += words
            values.append(result)
        return [*text, CLOSE], OPERATORS[operator](values)
