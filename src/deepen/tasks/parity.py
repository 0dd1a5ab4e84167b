"""Parity: whether the number of ones so far is even.

    1 0 1 1          odd odd even odd

Either every position is asked for, or the last one alone, which is much harder to learn.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from deepen.tasks.reasoning import LONGER, TEST, Question, Range, Reasoning, between

ANSWERS = ("even", "odd")


class Parity(Reasoning):
    """Parity of bits.

    Attributes:
        length: bits.
        longer: bits beyond training.
        every: whether every position is asked for.
    """

    about: ClassVar[str] = "whether the number of ones so far is even"

    name: Literal["parity"] = "parity"
    length: Range = (1, 32)
    longer: Range = (33, 64)
    every: bool = True

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("0", "1", *ANSWERS)

    @property
    def parts(self) -> tuple[str, ...]:
        return TEST, LONGER

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        bits = drawn.integers(0, 2, between(drawn, self.longer if part == LONGER else self.length))
        answers = [ANSWERS[parity] for parity in np.cumsum(bits) % 2]
        asked = answers if self.every else [*[None] * (len(bits) - 1), answers[-1]]
        return [str(bit) for bit in bits], asked
