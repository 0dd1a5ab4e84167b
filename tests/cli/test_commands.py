"""Every command in a process of its own, on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.models import TEXT, checkpoint, deepen

LOOP = "0-1 (2-3)*2 4-5"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    checkpoint(folder / "llama", chat=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def test_show(place: Path) -> None:
    svg = place / "drawing.svg"
    ran = deepen("show", place / "llama", LOOP, "--context", "100", "--svg", svg)
    assert (ran.status, ran.err) == (0, "")
    for words in ("family         llama", LOOP, "x1.333", "100 tokens", "×2"):
        assert words in ran.out
    assert svg.read_text(encoding="utf-8").startswith("<svg")


def test_eval(place: Path) -> None:
    ran = deepen("eval", place / "llama", "0-5", LOOP, "--data", place / "text.txt", "--context", "32", "--json")
    assert ran.status == 0
    document = json.loads(ran.out)
    assert [row["program"] for row in document["results"]] == ["0-5", LOOP]
    assert document["results"][0]["perplexity"] != document["results"][1]["perplexity"]
    assert "loading 0-5 for 2 programs" in ran.err


def test_run(place: Path) -> None:
    ran = deepen("run", place / "llama", LOOP, "--prompt", "who goes", "--tokens", "6")
    assert ran.status == 0
    assert len(ran.out.rstrip("\n")) > 0
    assert ran.err.startswith("6 tokens in ")


def test_apply(place: Path) -> None:
    ran = deepen("apply", place / "llama", "0-2 5", "-o", place / "small", "--verify")
    assert ran.status == 0
    for words in ("config num_hidden_layers  6 -> 4", "3 <- 5", "model.layers 3-4 (18 tensors)", "verified", "small"):
        assert words in ran.out
    config = json.loads((place / "small" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 4)
    assert (place / "small" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_the_native_form_is_read_back_by_every_command(place: Path) -> None:
    assert deepen("apply", place / "llama", LOOP, "-o", place / "native").status == 0
    shown = json.loads(deepen("show", place / "native", "--json").out)
    assert (shown["program"], shown["cost"]["visits"]) == (LOOP, 8)
    options = ("--data", place / "text.txt", "--context", "32", "--tokens", "64", "--json")
    once, stored = (deepen("eval", place / "llama", LOOP, *options), deepen("eval", place / "native", *options))
    assert stored.status == 0, stored.err
    same = [json.loads(ran.out)["results"][0]["nll"] for ran in (once, stored)]
    assert same[0] == same[1]


@pytest.mark.slow
def test_families_check() -> None:
    right = deepen("families", "--check", "llama", "--json")
    report = json.loads(right.out)
    assert report["outcome"] == "right"
    assert {verdict["outcome"] for verdict in report["verdicts"]} == {"right"}
    stages = deepen("families", "--check", "swin")
    assert stages.status == 0
    assert "swin: refused, its layers stand in stages" in stages.out
    unknown = deepen("families", "--check", "lama")
    assert unknown.status == 1
    assert "did you mean 'llama'" in unknown.err


def test_families() -> None:
    ran = deepen("families", "--json")
    rows = {(row["family"], row["tower"]): row for row in json.loads(ran.out)["families"]}
    assert rows["llama", "text"]["kind"] == "serial"
    assert rows["gpt_neox", "text"]["kind"] == "parallel"
    assert rows["t5", "decoder"]["depth"] == "num_decoder_layers"
    assert len(rows) > 40


def test_methods() -> None:
    ran = deepen("methods")
    assert ran.status == 0
    (line,) = (line for line in ran.out.splitlines() if line.startswith("block_influence"))
    assert "arXiv:2403.03853" in line
    assert "deepen/probe/scores/block_influence.py" in line


@pytest.mark.slow
def test_demo(place: Path) -> None:
    out = place / "demo"
    arguments = ["demo", "--model", place / "llama", "--data", place / "text.txt", "--out", out, "--tokens", "600"]
    ran = deepen(*arguments, "--json", "--prompt", "the king")
    # windows of 512 are more than the 64 positions of the tiny model
    assert (ran.status, ran.out) == (2, "")
    assert "64 positions" in ran.err
    assert not out.exists()
    wide = checkpoint(place / "wide", max_position_embeddings=1024)
    ran = deepen(*["demo", "--model", wide, *arguments[3:]], "--json", "--prompt", "the king")
    assert ran.status == 0, ran.err
    document = json.loads(ran.out)
    programs = [row["program"] for row in document["results"]]
    assert programs == ["0-5", "2-5", "0-1 4-5", "0-3", "0-1 (2-3)*2 4-5", "0-2 {3|4} 5"]
    assert document["baked"]["equal"] is True
    assert document["baked"]["layers"] == 8
    html = (out / "index.html").read_text(encoding="utf-8")
    # a drawing a program, one a search, and charts
    assert html.count('class="drawing"') == 6 + 2
    assert html.count('class="chart"') == 6 + 2
    assert [found["method"] for found in document["searches"]] == ["contiguous", "greedy"]
    for found in document["searches"]:
        assert found["program"] in html
        assert found["cost"] <= 4.5
    assert [path.name for path in out.iterdir()] == ["index.html"]


def test_version_and_the_module() -> None:
    ran = deepen("--version")
    assert (ran.status, ran.out.strip()) == (0, "0.1.0")


@pytest.mark.skipif(os.name == "nt", reason="SIGINT to one process")
def test_interrupted(place: Path) -> None:
    long = place / "long.txt"
    long.write_text(TEXT * 200, encoding="utf-8")
    before = sorted(place.rglob("*"))
    command = [sys.executable, "-m", "deepen", "eval", place / "llama", "--data", long, "--context", "32"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # where the suite itself runs in the background, SIGINT may be ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    # the first line says that the model is being loaded; the evaluation that follows takes minutes
    assert process.stderr.readline().startswith("loading")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(os.name == "nt", reason="a shell pipe")
def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m deepen families --json | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    # either everything fitted into the pipe, or the writer was told quietly
    assert done.stdout.splitlines()[0] == "{"
    assert done.stdout.splitlines()[1] in ("0", "141")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_terminal_without_unicode_still_gets_the_drawing(place: Path) -> None:
    ran = deepen("show", place / "llama", LOOP, env={"PYTHONIOENCODING": "ascii"})
    assert (ran.status, ran.err) == (0, "")
    assert "?" in ran.out
