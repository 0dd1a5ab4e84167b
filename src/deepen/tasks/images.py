"""Classification of small grey images.

| source | images | classes | from |
|---|---|---|---|
| `fashion-mnist` | 60,000 and 10,000 of 28 x 28 | 10 kinds of clothes | the Debian package dataset-fashion-mnist |
| `digits` | 1,797 of 8 x 8; the last 297 are the test | 10 digits | the Python package scikit-learn |

Grey values become numbers with the mean 0 and the deviation 1 of the images that are trained on.

Sources: Xiao, Rasul, Vollgraf, Fashion-MNIST, arXiv:1708.07747; Alpaydin and Kaynak, Optical Recognition of Handwritten
Digits, UCI, 1998.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepen.errors import DataError
from deepen.tasks.examples import Examples
from deepen.tasks.packages import inside, system
from deepen.tasks.task import Task

FASHION = "/usr/share/datasets/fashion-mnist"
# Where the numbers begin in the files.
HEADER = {"images-idx3": 16, "labels-idx1": 8}
TRAINED_DIGITS = 1500


class Images(Task):
    """Images to classify.

    Attributes:
        source: `fashion-mnist` or `digits`.
        dev: share of the training images to look at while training.
        examples: images of each held-out part, at most.
        folder: where the files of Fashion-MNIST lie, if not where its package puts them.
    """

    about: ClassVar[str] = "the class of a small grey image"

    name: Literal["images"] = "images"
    source: Literal["fashion-mnist", "digits"] = "fashion-mnist"
    dev: float = Field(default=0.1, gt=0, lt=1)
    examples: int = Field(default=10000, ge=1)
    folder: str = ""

    def data(self) -> Examples:
        images, classes, test, test_classes = self._fashion() if self.source == "fashion-mnist" else _digits()
        mean, deviation = images.mean(), images.std()
        images, test = (((each - mean) / deviation)[:, None].astype(np.float32) for each in (images, test))
        at = round(len(images) * (1 - self.dev))
        return Examples(
            self.source,
            {
                "input": "patches",
                "image": list(images.shape[1:]),
                "output": "classes",
                "classes": int(classes.max()) + 1,
                "causal": False,
            },
            (images[:at], classes[:at]),
            {
                "dev": (images[at:][: self.examples], classes[at:][: self.examples]),
                "test": (test[: self.examples], test_classes[: self.examples]),
            },
        )

    def _fashion(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        folder = Path(self.folder) if self.folder else system(FASHION, "dataset-fashion-mnist")
        found = []
        for part in ("train", "t10k"):
            pixels = _idx(folder / f"{part}-images-idx3-ubyte.gz").reshape(-1, 28, 28).astype(np.float64)
            labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int64)
            if len(pixels) != len(labels):
                raise DataError(f"{folder}: {len(pixels)} images of {part}, but {len(labels)} labels")
            found += [pixels, labels]
        return tuple(found)  # pyright: ignore[reportReturnType]


def _idx(path: Path) -> NDArray[np.uint8]:
    kind = next(name for name in HEADER if name in path.name)
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8, offset=HEADER[kind])
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}; it comes with: apt-get install dataset-fashion-mnist"
        ) from error


def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    path = inside("sklearn", "scikit-learn==1.9.1", "datasets/data/digits.csv.gz")
    with gzip.open(path) as file:
        rows = np.loadtxt(file, delimiter=",")
    images, classes, at = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64), TRAINED_DIGITS
    return images[:at], classes[:at], images[at:], classes[at:]
