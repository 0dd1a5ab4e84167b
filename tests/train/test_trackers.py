"""Trackers get the figures of the log, at the same steps, and cannot stop a run."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepen.errors import UsageError
from deepen.train.log import Entry
from deepen.train.recipe_file import RecipeFile
from deepen.train.recipe_run import run_recipe
from deepen.train.trackers import Trackers, figures, trackers_of

RECIPE = {
    "stack": {"layers": 1, "width": 8, "heads": 1},
    "task": {"name": "parity", "length": [3, 4], "longer": [5, 6], "examples": 8},
    "train": {"steps": 3, "batch": 4, "evaluate": 2, "save": 0},
}


class Kept:
    """Stands for both packages: an event writer, and a run of a project."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = 0

    def writer(self, folder: str, purge_step: int) -> Kept:
        self.made.append({"folder": folder, "purge_step": purge_step})
        return self

    def init(self, **given: Any) -> Kept:
        print("a line for people")
        self.made.append(given)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars += [(name, value, step) for name, value in values.items()]

    def close(self) -> None:
        self.closed += 1

    finish = close


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    found, board, trackio = Kept(), ModuleType("torch.utils.tensorboard"), ModuleType("trackio")
    vars(board)["SummaryWriter"] = found.writer
    vars(trackio)["init"] = found.init
    # accelerate looks for it
    trackio.__spec__ = ModuleSpec("trackio", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    return found


@pytest.mark.parametrize("field", ["tensorboard", "trackio"])
def test_a_tracker_has_the_figures_of_the_log(
    tmp_path: Path, kept: Kept, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "runs")
    run_recipe(RecipeFile.of({**RECIPE, "log": {field: where}}), tmp_path / "a", models=False)
    lines = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "grad_norm"):
        assert [(value, step) for own, value, step in kept.scalars if own == name] == [
            (line[name], line["step"]) for line in lines
        ]
    assert [(value, step) for own, value, step in kept.scalars if own == "held_out/loss"] == [(lines[1]["held_out"], 2)]
    assert [step for own, _, step in kept.scalars if own == "held_out/accuracy"] == [2]
    (made,) = kept.made
    if field == "tensorboard":
        assert made == {"folder": str(tmp_path / "runs" / "a"), "purge_step": 1}
    else:
        assert (made["project"], made["name"], made["resume"]) == (where, "a", "allow")
        assert made["config"]["train"]["steps"] == 3
        out = capsys.readouterr()
        assert "a line" not in out.out
        assert "a line" in out.err
    assert kept.closed == 1


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UsageError, match=r"log\.trackio needs trackio.*deepen\[trackio\]"):
        run_recipe(RecipeFile.of({**RECIPE, "log": {"trackio": "depth"}}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(kept: Kept) -> None:
    class Broken:
        def write(self, step: int, values: Any) -> None:
            raise OSError("no space")

        def close(self) -> None:
            raise AssertionError("it was left out")

    trackers = Trackers({"tensorboard": Broken(), "trackio": trackers_of(asking("p"), "a").each["trackio"]})
    with pytest.warns(UserWarning, match=r"log\.tensorboard: stopped after OSError.*the log of the run"):
        trackers.write(entry(1))
    trackers.write(entry(2))
    trackers.close()
    assert [step for name, _, step in kept.scalars if name == "loss"] == [1, 2]
    assert kept.closed == 1


def test_figures_leave_out_what_a_step_does_not_have() -> None:
    assert figures(entry(4)) == {"loss": 2.0, "lr": 0.1, "grad_norm": 3.0, "tokens_per_second": 50.0}


def test_a_tracker_may_be_added_on_resume(tmp_path: Path, kept: Kept) -> None:
    def stop(at: Entry, steps: int) -> None:
        if at.step == 2:
            raise KeyboardInterrupt

    recipe = RecipeFile.of({**RECIPE, "train": {**RECIPE["train"], "save": 1}})
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path / "a", report=stop)
    run_recipe(
        RecipeFile.of({**recipe.plain(), "log": {"tensorboard": "runs"}}), tmp_path / "a", resume=True, models=False
    )
    (made,) = kept.made
    first = min(step for _, _, step in kept.scalars)
    assert made["purge_step"] == first == 2


def asking(project: str) -> RecipeFile:
    return RecipeFile.of({**RECIPE, "log": {"trackio": project}})


def entry(step: int) -> Entry:
    return Entry(step=step, loss=2.0, lr=0.1, grad_norm=3.0, tokens_per_second=50.0)
