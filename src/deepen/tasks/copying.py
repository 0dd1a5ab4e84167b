"""Copying: write a sequence once more, as it was or from its end.

    a c b a =          a c b a

Source: Jelassi et al., Repeat After Me: Transformers are Better than State Space Models at Copying, arXiv:2402.01032.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from deepen.tasks.reasoning import LONGER, TEST, Question, Range, Reasoning, answered, between


class Copying(Reasoning):
    """Sequences to repeat.

    Attributes:
        letters: different symbols.
        length: symbols of a sequence.
        longer: symbols beyond training.
        backwards: whether the copy begins with the last symbol.
    """

    about: ClassVar[str] = "a sequence once more"

    name: Literal["copying"] = "copying"
    letters: int = Field(default=16, ge=1, le=26)
    length: Range = (1, 16)
    longer: Range = (17, 32)
    backwards: bool = False

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*(chr(97 + letter) for letter in range(self.letters)), "=")

    @property
    def parts(self) -> tuple[str, ...]:
        return TEST, LONGER

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        size = between(drawn, self.longer if part == LONGER else self.length)
        text = [chr(97 + letter) for letter in drawn.integers(0, self.letters, size)]
        return answered([*text, "="], text[::-1] if self.backwards else text)
