"""p-hop induction: go back p times to what followed the last occurrence of the same symbol.

    find(i)    the largest j <= i with x[j - 1] = x[i]
    answer     x[find(find(... find(i)))], p times; `?` where one of them does not exist

    + + b a c b d a b c b d        two hops from the last b: to the c after the b before, to the b after the c before

The number of hops is written before the sequence, one `+` each. Every position is asked for.

Source: Sanford, Hsu, Telgarsky, Transformers, parallel computation, and logarithmic depth, arXiv:2402.09268.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from deepen.tasks.reasoning import DEEPER, LONGER, Question, Range, Reasoning, between

HOP, NONE = "+", "?"


class PHop(Reasoning):
    """Hops of induction.

    Attributes:
        letters: different symbols of a sequence.
        length: symbols of a sequence.
        longer: symbols of those beyond training.
        hops: p.
        deeper: hops beyond training.
    """

    about: ClassVar[str] = "p times back to what followed the last occurrence of the same symbol"

    name: Literal["p-hop"] = "p-hop"
    letters: int = Field(default=4, ge=1, le=26)
    length: Range = (32, 64)
    longer: Range = (65, 128)
    hops: Range = (1, 4)
    deeper: Range = (5, 8)

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*(chr(97 + letter) for letter in range(self.letters)), HOP, NONE)

    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        size = between(drawn, self.longer if part == LONGER else self.length)
        hops = between(drawn, self.deeper if part == DEEPER else self.hops)
        sequence = [chr(97 + letter) for letter in drawn.integers(0, self.letters, size)]
        return [HOP] * hops + sequence, [None] * hops + hop(sequence, hops)


def hop(sequence: Sequence[str], hops: int) -> list[str]:
    """The answer at each position."""
    last: dict[str, int] = {}
    found: list[int | None] = []
    for place, symbol in enumerate(sequence):
        found.append(last[symbol] + 1 if symbol in last else None)
        last[symbol] = place
    answers = []
    for place in range(len(sequence)):
        at: int | None = place
        for _ in range(hops):
            at = None if at is None else found[at]
        answers.append(NONE if at is None else sequence[at])
    return answers
