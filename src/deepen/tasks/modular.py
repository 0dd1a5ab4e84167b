"""Chains of arithmetic modulo m, from left to right: the answer needs every step before it.

    3 + 5 * 2 - 6 =          modulo 7: ((3 + 5) * 2) - 6 = 10 = 3

Only the last value is asked for. The steps of a chain are its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from deepen.tasks.reasoning import DEEPER, TEST, Question, Range, Reasoning, answered, between

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class Modular(Reasoning):
    """Arithmetic modulo a number.

    Attributes:
        modulus: m.
        steps: operations of a chain.
        deeper: operations beyond training.
    """

    about: ClassVar[str] = "the value of a chain of +, - and * modulo m"

    name: Literal["modular"] = "modular"
    modulus: int = Field(default=7, ge=2, le=1000)
    steps: Range = (1, 6)
    deeper: Range = (7, 12)

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*map(str, range(self.modulus)), *OPERATIONS, "=")

    @property
    def parts(self) -> tuple[str, ...]:
        return TEST, DEEPER

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        steps = between(drawn, self.deeper if part == DEEPER else self.steps)
        numbers = drawn.integers(0, self.modulus, steps + 1).tolist()
        signs = [list(OPERATIONS)[sign] for sign in drawn.integers(0, len(OPERATIONS), steps)]
        text = [str(numbers[0])]
        for sign, number in zip(signs, numbers[1:], strict=True):
            text += [sign, str(number)]
        return answered([*text, "="], [str(value(text, self.modulus))])


def value(chain: Sequence[str], modulus: int) -> int:
    """What a chain comes to."""
    found = int(chain[0]) % modulus
    for sign, number in zip(chain[1::2], chain[2::2], strict=True):
        found = OPERATIONS[sign](found, int(number)) % modulus
    return found
