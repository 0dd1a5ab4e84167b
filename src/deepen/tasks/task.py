"""What every task has: typed options, and data that is a function of them and a seed.

task = read_task({"name": "p-hop", "hops": 4})         options, checked
data = task.data()                                     reads or makes what it needs
data.batch(step, size, seed)                           the batch of a step, the same at every call
data.held_out("test", size)                            batches that training never sees, always the same
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from deepen.tasks.batch import Batch

Measure = Literal["bits_per_byte", "accuracy", "exact_match"]


class Data(ABC):
    """The data of a task.

    Attributes:
        stack: the fields of a stack's configuration that follow from the data: vocabulary, classes ...
        measure: what is reported beside the loss.
        splits: the names of the held-out parts; training looks at the first while it runs.
        digest: tells this data from other data.
        tokenizer: the JSON of a `tokenizers.Tokenizer`, for tasks whose tokens are text.
    """

    stack: Mapping[str, Any]
    measure: Measure
    splits: tuple[str, ...]
    digest: str
    tokenizer: str | None = None

    @abstractmethod
    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step, counted from 0."""

    @abstractmethod
    def held_out(self, split: str, size: int) -> Iterator[Batch]:
        """The batches of a held-out part, at most `size` rows each."""

    def peers(self) -> Mapping[str, float]:
        """What a simple model that is fitted here reaches on the last split, by name."""
        return {}


class Task(BaseModel, ABC):
    """The options of a task; each task has a class, whose field `name` is what a recipe calls it.

    Class attributes:
        about: what has to be told, in one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: ClassVar[str] = ""

    @abstractmethod
    def data(self) -> Data:
        """Reads or makes the data.

        Raises:
            DataError: what it needs is not there, or too small; says how to get it.
        """


def dice(*numbers: int) -> np.random.Generator:
    """A generator that depends on these numbers alone."""
    return np.random.default_rng(numbers)
