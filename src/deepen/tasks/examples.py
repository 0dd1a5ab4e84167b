"""Labelled examples as batches: what images and time series share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepen.errors import DataError
from deepen.tasks.batch import Batch
from deepen.tasks.packages import digest_of
from deepen.tasks.task import Data, Measure, dice

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]


class Examples(Data):
    """Labelled examples.

    Args:
        where: what errors call the data.
        stack: fields of a stack's configuration.
        train: inputs [n, ...] and classes [n].
        held_out: the same for each held-out part.

    Raises:
        DataError: a part is empty.
    """

    measure: Measure = "accuracy"

    def __init__(self, where: str, stack: Mapping[str, Any], train: Labelled, held_out: Mapping[str, Labelled]) -> None:
        parts = {"train": train, **held_out}
        if empty := [name for name, (inputs, _) in parts.items() if not len(inputs)]:
            raise DataError(f"{where}: the part {empty[0]} has no examples")
        self.stack, self.splits = stack, tuple(held_out)
        self.parts = {
            name: (torch.from_numpy(inputs), torch.from_numpy(classes)) for name, (inputs, classes) in parts.items()
        }
        self.digest = digest_of(*(array.tobytes() for pair in parts.values() for array in pair))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        count = len(self.parts["train"][0])
        rows = np.arange(step * size, (step + 1) * size)
        orders = {int(epoch): dice(seed, int(epoch)).permutation(count) for epoch in np.unique(rows // count)}
        return self._rows("train", [int(orders[row // count][row % count]) for row in rows.tolist()])

    def held_out(self, split: str, size: int) -> Iterator[Batch]:
        count = len(self.parts[split][0])
        for at in range(0, count, size):
            yield self._rows(split, list(range(at, min(at + size, count))))

    def _rows(self, part: str, rows: list[int]) -> Batch:
        inputs, classes = self.parts[part]
        return Batch(inputs=inputs[rows], targets=classes[rows])
