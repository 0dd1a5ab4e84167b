"""`deepen search`: what it prints, writes and refuses, and that a stopped search goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepen.cli import main
from tests.cli.models import TEXT, checkpoint

OPTIONS = {"--context": "16", "--tokens": "64", "--held-out-tokens": "96", "--budget": "0.5", "--candidates": "30"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("search")
    checkpoint(made / "model")
    (made / "text.txt").write_text(TEXT, encoding="utf-8")
    return made


def command(folder: Path, out: Path, *more: str) -> list[str]:
    """A search of the tiny model; what is given replaces the usual options."""
    usual = {"--data": str(folder / "text.txt"), "--out": str(out), **OPTIONS}
    kept = [word for name, value in usual.items() if name not in more for word in (name, value)]
    return ["search", str(folder / "model"), *kept, *more]


def test_the_document_and_the_file_agree(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    assert main(command(folder, out, "--method", "greedy", "--json")) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert stored["result"].items() <= document.items()
    assert document["cost"] <= document["limit"] == 3
    assert document["searched"]["best"]["windows"] == 4
    assert document["held_out"]["best"]["windows"] == document["held_out"]["difference"]["windows"] == 6
    assert len(stored["candidates"]) == document["candidates"]
    costs = [point["cost"] for point in document["frontier"]]
    losses = [point["nll"] for point in document["frontier"]]
    assert costs == sorted(costs)
    assert losses == sorted(losses, reverse=True)
    assert f": {document['program']}" in printed.err


def test_people_get_both_figures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, tmp_path / "found", "--method", "contiguous")) == 0
    shown = capsys.readouterr().out
    stored = json.loads((tmp_path / "found" / "search.json").read_text(encoding="utf-8"))["result"]
    (line,) = [line for line in shown.splitlines() if line.startswith("best program")]
    assert line.split(maxsplit=2)[2] == stored["program"]
    assert f"x{stored['held_out']['difference']['ratio']:.4g}" in shown
    for line in ("searched", "held out", "frontier", str(tmp_path / "found" / "search.json")):
        assert line in shown


def test_moves_are_names_with_commas(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    assert main(command(folder, out, "--moves", "part", "--method", "random", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert ".a" in document["program"] or ".f" in document["program"]
    assert json.loads(out.read_text(encoding="utf-8"))["setup"]["moves"] == ["part"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_search_goes_on(folder: Path, tmp_path: Path, end: signal.Signals) -> None:
    whole, stopped = tmp_path / "whole.json", tmp_path / "stopped.json"
    more = ("--method", "evolution", "--candidates", "120")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    given = [sys.executable, "-m", "deepen", *command(folder, stopped, *more)]
    with subprocess.Popen(given, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as running:
        while running.poll() is None and not (stopped.exists() and kept(stopped)):
            time.sleep(0.02)
        running.send_signal(end)
        _, said = running.communicate()
    before = kept(stopped)
    assert 0 < before < 120
    if end is signal.SIGINT:
        assert running.returncode == 130
        assert f"kept in {stopped}; go on with the same command and --resume" in said
    assert main(command(folder, stopped, *more, "--resume")) == 0
    assert main(command(folder, whole, *more)) == 0
    one, two = (json.loads(path.read_text(encoding="utf-8")) for path in (whole, stopped))
    assert one["candidates"] == two["candidates"]
    assert one["result"]["program"] == two["result"]["program"]
    assert one["result"]["held_out"]["difference"] == two["result"]["held_out"]["difference"]


def kept(path: Path) -> int:
    return len(json.loads(path.read_text(encoding="utf-8"))["candidates"])


@pytest.mark.parametrize(
    "more, status, words",
    [
        (("--budget", "0.1"), 2, "cannot be met"),
        (("--method", "gredy"), 2, "did you mean 'greedy'?"),
        (("--moves", "drop,swpa"), 2, "did you mean 'swap'?"),
        (("--data", "missing.txt"), 1, "cannot be read"),
        (("--resume",), 1, "no search to go on with"),
        (("--context", "64", "--tokens", "100"), 2, "fewer than two windows of 64"),
        (("--out", "missing/folder"), 1, "cannot make missing/folder"),
    ],
)
def test_bad_input_is_one_message(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command(folder, tmp_path / "search.json", *more)) == status
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_kept(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    out.write_text("mine")
    assert main(command(folder, out)) == 1
    assert "exists already and is left as it is; --resume goes on with it" in capsys.readouterr().err
    assert out.read_text() == "mine"
