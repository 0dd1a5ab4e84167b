"""Suites that run: results, resumption, failures, and the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepen.compare.compare import compare
from deepen.compare.run import execute
from deepen.compare.suite import Suite
from deepen.errors import DeepenError, UsageError
from deepen.report.comparison import comparison
from deepen.report.page import Page, render

SUITE: dict[str, Any] = {
    "recipe": {
        "stack": {"layers": 2, "width": 8, "heads": 2},
        "task": {"name": "parity", "length": [3, 5], "longer": [6, 8], "examples": 32},
        "train": {"steps": 4, "batch": 4, "evaluate": 2, "save": 1},
    },
    "baseline": "untied",
    "seeds": [0, 1],
    "variants": {"untied": {}, "looped": {"stack": {"layers": 1, "program": "(0)*2"}}},
}


def read(folder: Path, **changes: Any) -> tuple[Suite, str]:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({**SUITE, **changes}, sort_keys=False), encoding="utf-8")
    return Suite.read(path), str(path)


def here(jobs: Any, workers: int, models: bool) -> Any:
    """Runs in this process, which takes no seconds to start."""
    for job in jobs:
        try:
            execute(job.folder, models=models)
        except DeepenError as error:
            yield job, str(error)
        else:
            yield job, ""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepen.compare.compare._processes", here)


@pytest.mark.usefixtures("at_once")
def test_a_suite_gives_a_result_and_goes_on_where_it_was(tmp_path: Path) -> None:
    suite, where = read(tmp_path)
    ended: list[tuple[str, int, int]] = []
    found = compare(suite, where, tmp_path / "out", report=lambda *each: ended.append(each))
    assert [name for name, _, _ in ended] == ["untied-0", "untied-1", "looped-0", "looped-1"]
    assert ended[-1][1:] == (4, 4)
    lines = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [(line["variant"], line["seed"]) for line in lines] == [
        ("untied", 0), ("untied", 1), ("looped", 0), ("looped", 1),
    ]  # fmt: skip
    untied, looped = lines[0], lines[2]
    assert untied["executed_parameters"] == untied["parameters"]
    assert looped["executed_parameters"] > looped["parameters"]
    assert untied["flops_per_token"] == looped["flops_per_token"]
    assert [point["step"] for point in untied["curve"]] == [2, 4]
    assert untied["curve"][-1]["flops"] == pytest.approx(untied["flops"])
    assert not (tmp_path / "out" / "runs" / "untied-0" / "model").exists()
    assert "looped" in render(Page("t", "l", list(comparison(found))))

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("run.json")}
    (tmp_path / "out" / "runs" / "looped-1" / "run.json").unlink()
    ended.clear()
    again = compare(suite, where, tmp_path / "out", report=lambda *each: ended.append(each))
    assert [name for name, _, _ in ended] == ["looped-1"]
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert [path.parent.name for path in changed] == ["looped-1"]
    assert [each["values"] for each in again["summary"]["variants"]] == [
        each["values"] for each in found["summary"]["variants"]
    ]


@pytest.mark.usefixtures("at_once")
def test_another_suite_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    suite, where = read(tmp_path, seeds=[0], variants={"untied": {}})
    compare(suite, where, tmp_path / "out")
    other, _ = read(tmp_path, seeds=[1], variants={"untied": {}})
    with pytest.raises(UsageError, match="holds runs of another suite"):
        compare(other, where, tmp_path / "out")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="is not empty and holds no suite"):
        compare(suite, where, tmp_path / "else")
    assert [path.name for path in (tmp_path / "else").iterdir()] == ["letter.txt"]


@pytest.mark.usefixtures("at_once")
def test_a_loss_that_is_not_finite_is_a_result_and_is_left_out(tmp_path: Path) -> None:
    wild = {"train": {"rate": 1e30, "warmup": 0, "clip": 1e30}}
    suite, where = read(tmp_path, variants={"untied": {}, "wild": wild})
    found = compare(suite, where, tmp_path / "out")["summary"]
    assert [each["name"] for each in found["variants"]] == ["untied"]
    assert {(each["name"], each["seed"]) for each in found["failed"]} == {("wild", 0), ("wild", 1)}
    assert all("step" in each["why"] for each in found["failed"])


def test_a_run_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(jobs: Any, workers: int, models: bool) -> Any:
        yield from here(jobs[:1], workers, models)
        yield jobs[1], "the disk is full"

    monkeypatch.setattr("deepen.compare.compare._processes", some)
    suite, where = read(tmp_path, variants={"untied": {}})
    with pytest.raises(DeepenError, match="1 of 2 runs failed: untied-1: the disk is full"):
        compare(suite, where, tmp_path / "out")
    assert (tmp_path / "out" / "runs" / "untied-0" / "run.json").is_file()


def command(suite: str, out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "deepen", "compare", suite, "-o", str(out), *words]


@pytest.mark.slow
def test_processes_give_what_one_process_gives_also_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = {**SUITE["recipe"], "train": {**SUITE["recipe"]["train"], "steps": 60}}
    suite, where = read(tmp_path, recipe=longer)
    process = subprocess.Popen(command(where, tmp_path / "killed", "--workers", "2"), start_new_session=True)
    # a run is under way when it has a state
    while not list((tmp_path / "killed").glob("runs/*/model.training/step-*")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # its runs stop by themselves; the same suite waits for them
    subprocess.run(command(where, tmp_path / "killed", "--workers", "2"), check=True)
    monkeypatch.setattr("deepen.compare.compare._processes", here)
    found = compare(suite, where, tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "killed" / "runs.jsonl").read_text().splitlines()]
    values = [value for each in found["summary"]["variants"] for value in each["values"]]
    assert [line["results"][line["split"]]["exact_match"] for line in lines] == values


@pytest.mark.slow
def test_a_cluster_of_two_machines_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    suite, where = read(tmp_path, seeds=[0])
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        found = compare(suite, where, tmp_path / "out", ray=cluster.address)
    finally:
        cluster.shutdown()
    monkeypatch.setattr("deepen.compare.compare._processes", here)
    again = compare(suite, where, tmp_path / "here")
    assert [each["values"] for each in found["summary"]["variants"]] == [
        each["values"] for each in again["summary"]["variants"]
    ]
