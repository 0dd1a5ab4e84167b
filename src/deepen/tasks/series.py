"""Classification of time series: sets of the UCR and UEA archives that come with the package aeon.

| set | train and test | channels x length | classes |
|---|---|---|---|
| `GunPoint` | 50, 150 | 1 x 150 | 2 |
| `ItalyPowerDemand` | 67, 1029 | 1 x 24 | 2 |
| `ArrowHead` | 36, 175 | 1 x 251 | 3 |
| `OSULeaf` | 200, 242 | 1 x 427 | 6 |
| `ACSF1` | 100, 100 | 1 x 1460 | 10 |
| `BasicMotions` | 40, 40 | 6 x 100 | 4 |
| `JapaneseVowels` | 270, 370 | 12 x up to 29 | 9 |
| `PickupGestureWiimoteZ` | 50, 50 | 1 x up to 361 | 10 |

Channels get the mean 0 and the deviation 1 of the series that are trained on; shorter series end with zeros.

Source: Dau et al., The UCR Time Series Archive, arXiv:1810.07758.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from deepen.errors import DataError
from deepen.tasks.examples import Examples
from deepen.tasks.packages import inside
from deepen.tasks.task import Task

# A series [c, t] and the name of its class.
Series = tuple[NDArray[np.float64], str]


class TimeSeries(Task):
    """Time series to classify.

    Attributes:
        set: its name in the archive.
        folder: where the files `NAME_TRAIN.ts` and `NAME_TEST.ts` lie, if not in the package aeon.
    """

    about: ClassVar[str] = "the class of a time series"

    name: Literal["series"] = "series"
    set: str = "GunPoint"
    folder: str = ""

    def data(self) -> Examples:
        folder = Path(self.folder) if self.folder else inside("aeon", "aeon==1.6.0", f"datasets/data/{self.set}")
        train, test = (read_ts(folder / f"{self.set}_{part}.ts") for part in ("TRAIN", "TEST"))
        names = sorted({name for _, name in train})
        if unknown := {name for _, name in test} - set(names):
            raise DataError(f"{folder}: the test part has the class {sorted(unknown)[0]!r}, which the other has not")
        channels = {len(series) for series, _ in (*train, *test)}
        if len(channels) != 1:
            raise DataError(f"{folder}: series have {sorted(channels)} channels; expected one number")
        length = max(series.shape[1] for series, _ in (*train, *test))
        points = np.concatenate([series for series, _ in train], 1)
        mean, deviation = points.mean(1, keepdims=True), points.std(1, keepdims=True) + 1e-8

        def padded(part: list[Series]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            made = np.zeros((len(part), *(len(mean), length)), np.float32)
            for row, (series, _) in enumerate(part):
                made[row, :, : series.shape[1]] = (series - mean) / deviation
            return made, np.array([names.index(name) for _, name in part], np.int64)

        stack = {
            "input": "series",
            "channels": len(mean),
            "output": "classes",
            "classes": len(names),
            "causal": False,
            "context": length,
        }
        return Examples(self.set, stack, padded(train), {"test": padded(test)})


def read_ts(path: Path) -> list[Series]:
    """The series of a file in the format of the archive: channels between colons, the class after the last one.

    Raises:
        DataError: it cannot be read, has no series, or a number that is missing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; it comes with: pip install --no-deps aeon==1.6.0"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(("@", "#")):
            continue
        *channels, name = line.strip().split(":")
        try:
            series = np.array([[float(value) for value in channel.split(",")] for channel in channels])
        except ValueError as error:
            raise DataError(f"{path}:{number}: expected channels of numbers, equally long: {error}") from error
        if not channels or not np.isfinite(series).all():
            raise DataError(f"{path}:{number}: a series has no numbers, or one that is not finite")
        found.append((series, name))
    if not found:
        raise DataError(f"{path}: the file holds no series")
    return found
