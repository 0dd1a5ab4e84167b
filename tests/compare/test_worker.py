"""A worker trains run after run, in forks that say what was wrong, and stops when its parent is gone."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepen.compare import worker as module
from deepen.compare.run import execute
from deepen.compare.worker import Worker
from deepen.errors import UsageError

RECIPE: dict[str, Any] = {
    "stack": {"layers": 1, "width": 8, "heads": 1},
    "task": {"name": "parity", "length": [3, 4], "longer": [5, 6], "examples": 8},
    "train": {"steps": 2, "batch": 4, "evaluate": 2, "save": 0},
}


def place(folder: Path, name: str, **train: Any) -> Path:
    made = folder / name
    made.mkdir()
    (made / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "train": {**RECIPE["train"], **train}}))
    return made


def forked(folder: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> str:
    monkeypatch.setattr(module, "execute", run)
    # an input that never ends and has nothing to read
    monkeypatch.setattr(module.select, "select", lambda watched, *_: (watched[:1], [], []))
    return module._forked(folder, False)


def test_a_fork_says_what_was_wrong_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, models: bool) -> None:
        (folder / "run.json").write_text("{}")

    def refuse(folder: Path, models: bool) -> None:
        raise UsageError("train.batch: 3\nrows")

    def break_(folder: Path, models: bool) -> None:
        raise ZeroDivisionError("by 0")

    def die(folder: Path, models: bool) -> None:
        signal.raise_signal(signal.SIGKILL)

    assert forked(tmp_path, monkeypatch, write) == ""
    assert (tmp_path / "run.json").is_file()
    assert forked(tmp_path, monkeypatch, refuse) == "train.batch: 3 rows"
    assert forked(tmp_path, monkeypatch, break_) == "ZeroDivisionError: by 0"
    assert forked(tmp_path, monkeypatch, die) == "ended with status -9"


def test_a_result_that_another_process_wrote_is_taken(tmp_path: Path) -> None:
    folder = place(tmp_path, "a")
    (folder / "run.json").write_text('{"failed": "elsewhere"}')
    assert execute(folder) == {"failed": "elsewhere"}


@pytest.mark.slow
def test_a_worker_gives_what_this_process_gives_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    first, broken, second = place(tmp_path, "a"), place(tmp_path, "b", steps=0), place(tmp_path, "c")
    worker = Worker(1)
    assert worker.run(first, False) == ""
    assert "train.steps" in worker.run(broken, False)
    assert worker.run(second, False) == ""
    worker.stop()
    worker.end()
    here = execute(place(tmp_path, "d"))
    for folder in (first, second):
        assert json.loads((folder / "run.json").read_text())["results"] == here["results"]


@pytest.mark.slow
def test_a_run_stops_and_saves_when_the_parent_is_gone(tmp_path: Path) -> None:
    folder = place(tmp_path, "a", steps=10**6, save=0, evaluate=0)
    worker = Worker(1)
    assert worker._process.stdin is not None
    worker._process.stdin.write(json.dumps({"folder": str(folder), "models": False}) + "\n")
    worker._process.stdin.flush()
    log = folder / "model.training" / "log.jsonl"
    while not log.is_file() or log.read_text().count("\n") < 3:
        time.sleep(0.1)
    worker.stop()
    worker.end()
    assert list((folder / "model.training").glob("step-*"))
    assert not (folder / "run.json").exists()
