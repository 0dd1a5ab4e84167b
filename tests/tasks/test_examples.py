"""Images and time series: files as they lie in their packages, and what is said where they are not."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from deepen.errors import DataError
from deepen.tasks import images, packages
from deepen.tasks.images import Images
from deepen.tasks.series import TimeSeries, read_ts


def test_digits_have_their_counts_and_an_epoch_reads_each_once() -> None:
    data = Images(source="digits", dev=0.1).data()
    assert {name: len(classes) for name, (_, classes) in data.parts.items()} == {"train": 1350, "dev": 150, "test": 297}
    assert data.stack["image"] == [1, 8, 8]
    assert data.stack["classes"] == 10
    rows = [data.batch(step, 50, 3) for step in range(27)]
    seen = torch.cat([batch.inputs.flatten(1) for batch in rows])
    assert len(seen.unique(dim=0)) == len(data.parts["train"][0].flatten(1).unique(dim=0))
    assert abs(float(data.parts["train"][0].mean())) < 0.02
    # the nearest neighbour knows most of them, so images and classes belong together
    train, test = data.parts["train"], data.parts["test"]
    near = torch.cdist(test[0].flatten(1), train[0].flatten(1)).argmin(1)
    assert float((train[1][near] == test[1]).float().mean()) > 0.9


def fashion(folder: Path, train: int = 30, test: int = 12) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        pixels, labels = draw.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        for kind, header, values in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
            with gzip.open(folder / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes(header) + values.astype(np.uint8).tobytes())


def test_fashion_mnist_is_read_from_the_files_of_its_package(tmp_path: Path) -> None:
    fashion(tmp_path)
    data = Images(folder=str(tmp_path), examples=2).data()
    assert {name: len(classes) for name, (_, classes) in data.parts.items()} == {"train": 27, "dev": 2, "test": 2}
    assert data.batch(0, 4, 0).inputs.shape == (4, 1, 28, 28)
    raw = np.random.default_rng(0).integers(0, 256, (30, 28, 28))
    wanted = (raw[3] - raw.mean()) / raw.std()
    assert np.allclose(data.parts["train"][0][3, 0], wanted, atol=1e-5)
    assert data.parts["train"][1][3] == 3


def test_missing_and_broken_files_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FASHION", str(tmp_path / "none"))
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        Images().data()
    fashion(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"train-images.*apt-get install"):
        Images(folder=str(tmp_path)).data()
    fashion(tmp_path, train=20)
    with gzip.open(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes(8 + 19))
    with pytest.raises(DataError, match="20 images of train, but 19 labels"):
        Images(folder=str(tmp_path)).data()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pip install --no-deps scikit-learn"):
        Images(source="digits").data()
    with pytest.raises(DataError, match="pip install --no-deps aeon"):
        TimeSeries().data()
    with pytest.raises(DataError, match="apt-get install bible-kjv"):
        packages.system(str(tmp_path / "bible"), "bible-kjv")


HEADER = "# a comment\n@problemName Toy\n@data\n"


def test_series_of_different_lengths_end_with_zeros_and_channels_are_normalised(tmp_path: Path) -> None:
    (tmp_path / "Toy_TRAIN.ts").write_text(f"{HEADER}1,2,3:0,0,6:up\n3,2:6,0:down\n")
    (tmp_path / "Toy_TEST.ts").write_text(f"{HEADER}2,2,2,2:2,2,2,2:down\n")
    data = TimeSeries(set="Toy", folder=str(tmp_path)).data()
    inputs, classes = data.parts["train"]
    assert inputs.shape == (2, 2, 4)
    assert classes.tolist() == [1, 0]
    points = np.array([1, 2, 3, 3, 2])
    assert np.allclose(inputs[0, 0], [*((np.array([1, 2, 3]) - points.mean()) / points.std()), 0], atol=1e-5)
    assert inputs[1, :, 2:].abs().sum() == 0
    assert data.stack | {"causal": False} == {
        "input": "series", "channels": 2, "output": "classes", "classes": 2, "causal": False, "context": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [("1,x:a", r"TRAIN\.ts:4: expected"), ("1,?:a", "expected"), ("1,nan:a", "not finite"), ("", "no series")],
)
def test_broken_series_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "Toy_TRAIN.ts"
    path.write_text(f"{HEADER}{line}\n")
    with pytest.raises(DataError, match=message):
        read_ts(path)


def test_a_class_that_training_never_sees_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Toy_TRAIN.ts").write_text(f"{HEADER}1,2:a\n")
    (tmp_path / "Toy_TEST.ts").write_text(f"{HEADER}1,2:b\n")
    with pytest.raises(DataError, match="'b', which the other has not"):
        TimeSeries(set="Toy", folder=str(tmp_path)).data()


@pytest.mark.slow
def test_packaged_sets_have_their_sizes() -> None:
    for name, train, test, shape, classes in (
        ("GunPoint", 50, 150, (1, 150), 2),
        ("BasicMotions", 40, 40, (6, 100), 4),
        ("JapaneseVowels", 270, 370, (12, 29), 9),
    ):
        data = TimeSeries(set=name).data()
        assert (len(data.parts["train"][0]), len(data.parts["test"][0])) == (train, test)
        assert tuple(data.parts["train"][0].shape[1:]) == shape
        assert data.stack["classes"] == classes
    clothes = Images().data()
    assert {name: len(each) for name, (_, each) in clothes.parts.items()} == {
        "train": 54000,
        "dev": 6000,
        "test": 10000,
    }
    assert torch.bincount(clothes.parts["test"][1]).tolist() == [1000] * 10
