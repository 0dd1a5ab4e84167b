"""Synthetic reasoning: questions drawn anew in every step, with answers that are computed exactly.

    symbols     a b a c d + =           what tokens stand for; the padding comes last
    drawn       inputs [t], targets [t]; a target of None asks nothing

The held-out parts are drawn with generators of their own: `test` from the sizes that training sees, `longer` and
`deeper` from sizes beyond them. Short questions have few forms, and some of `test` come up in training as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field

from deepen.tasks.batch import IGNORED, Batch
from deepen.tasks.packages import digest_of
from deepen.tasks.task import Data, Measure, Task, dice

TEST, LONGER, DEEPER = "test", "longer", "deeper"
# Keeps the draws of each part apart; training has the number of a step after it.
STREAMS = {"train": 0, TEST: 1, LONGER: 2, DEEPER: 3}
PADDING = "_"


def _rising(value: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= value[0] <= value[1]:
        raise ValueError("a range is two numbers, 1 or more, the second not below the first")
    return value


# The least and the largest of a size, both included.
Range = Annotated[tuple[int, int], AfterValidator(_rising)]
# Inputs and targets, both symbols.
Question = tuple[Sequence[str], Sequence[str | None]]


class Reasoning(Task):
    """A task whose questions are drawn.

    Attributes:
        examples: questions of each held-out part.
    """

    examples: int = Field(default=512, ge=1)

    @property
    @abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """What tokens stand for."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The held-out parts."""
        return TEST, LONGER, DEEPER

    @abstractmethod
    def draw(self, drawn: np.random.Generator, part: str) -> Question:
        """One question of a part, or of `train`."""

    def data(self) -> Questions:
        return Questions(self)


class Questions(Data):
    """Questions as batches, padded at their ends."""

    measure: Measure = "exact_match"

    def __init__(self, task: Reasoning) -> None:
        self.task, self.splits = task, task.parts
        self.token = {symbol: token for token, symbol in enumerate((*task.symbols, PADDING))}
        self.digest = digest_of(task.model_dump_json().encode())
        longest = max(batch.inputs.shape[1] for batch in (*self._parts.values(), self.batch(0, 64, 0)))
        self.stack = {"vocabulary": len(self.token), "context": longest, "causal": True}

    def batch(self, step: int, size: int, seed: int) -> Batch:
        drawn = dice(STREAMS["train"], seed, step)
        return self._padded([self.task.draw(drawn, "train") for _ in range(size)])

    def held_out(self, split: str, size: int) -> Iterator[Batch]:
        whole = self._parts[split]
        for at in range(0, len(whole), size):
            yield Batch(inputs=whole.inputs[at : at + size], targets=whole.targets[at : at + size])

    @cached_property
    def _parts(self) -> dict[str, Batch]:
        return {part: self._drawn(part) for part in self.splits}

    def _drawn(self, part: str) -> Batch:
        drawn = dice(STREAMS[part])
        return self._padded([self.task.draw(drawn, part) for _ in range(self.task.examples)])

    def _padded(self, questions: Sequence[Question]) -> Batch:
        length = max(len(inputs) for inputs, _ in questions)
        ids = np.full((len(questions), length), self.token[PADDING], np.int64)
        targets = np.full_like(ids, IGNORED)
        for row, (inputs, asked) in enumerate(questions):
            ids[row, : len(inputs)] = [self.token[symbol] for symbol in inputs]
            targets[row, : len(asked)] = [IGNORED if answer is None else self.token[answer] for answer in asked]
        return Batch(inputs=torch.from_numpy(ids), targets=torch.from_numpy(targets))


def answered(question: Sequence[str], answer: Sequence[str]) -> Question:
    """A question whose answer is written after it: the last symbol of the question predicts the first of the answer."""
    whole = [*question, *answer]
    return whole[:-1], [None] * (len(question) - 1) + list(answer)


def between(drawn: np.random.Generator, sizes: tuple[int, int]) -> int:
    """A size of a range, each as likely."""
    return int(drawn.integers(sizes[0], sizes[1] + 1))
