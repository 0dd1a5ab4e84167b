"""Dyck-k: brackets of k kinds; at every position the one that has to be closed next is asked for.

    ( [ ] ( )          ) ] ) ) )          `.` where nothing is open

A walk opens or closes with equal chance, and opens where nothing is open; it never opens more than the depth.

Source: Hewitt et al., RNNs can generate bounded hierarchical languages with optimal memory, arXiv:2010.07515, for the
language of bounded depth; asking for the top of its stack is a choice made here, since it has one right answer.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from deepen.tasks.reasoning import DEEPER, LONGER, Question, Range, Reasoning, between

EMPTY = "."


class Dyck(Reasoning):
    """Nested brackets.

    Attributes:
        kinds: k.
        length: brackets.
        longer: brackets beyond training.
        depth: brackets open at once, at most.
        deeper: those beyond training; a walk of this part reaches its depth wherever its length allows.
    """

    about: ClassVar[str] = "the bracket that has to be closed next"

    name: Literal["dyck"] = "dyck"
    kinds: int = Field(default=4, ge=1, le=26)
    length: Range = (8, 32)
    longer: Range = (33, 64)
    depth: Range = (2, 4)
    deeper: Range = (5, 8)

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*(f"<{kind}" for kind in range(self.kinds)), *(f"{kind}>" for kind in range(self.kinds)), EMPTY)

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        size = between(drawn, self.longer if part == LONGER else self.length)
        depth = between(drawn, self.deeper if part == DEEPER else self.depth)
        # where deeper walks have to go down before they wander
        down = depth if part == DEEPER else 1
        held: list[int] = []
        text, answers = [], []
        for place in range(size):
            opens = place < down or not held or (len(held) < depth and drawn.random() < 0.5)
            if opens:
                held.append(int(drawn.integers(self.kinds)))
                text.append(f"<{held[-1]}")
            else:
                text.append(f"{held.pop()}>")
            answers.append(f"{held[-1]}>" if held else EMPTY)
        return text, answers
