"""`deepen eval` against the functions it stands for, in the table and in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.cli import main
from tests.cli.models import TEXT, checkpoint

DOCS = [{"word": "king", "choices": ["dead", "long"], "answer": 0}, {"word": "who", "choices": ["a", "b"], "answer": 1}]
TASK = """\
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{word}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""
PROGRAMS = ("0-5", "0-3 5", "0-3 4.a 5")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    checkpoint(folder / "llama")
    checkpoint(folder / "bert", "bert", encoder=True)
    (folder / "text.txt").write_text(TEXT[:400], encoding="utf-8")
    (folder / "words.json").write_text(json.dumps(DOCS), encoding="utf-8")
    (folder / "words.yaml").write_text(TASK, encoding="utf-8")
    return folder


def run(place: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    words = [str(place / word) if (place / word).exists() else word for word in arguments]
    status = main(["eval", *words])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def results(place: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    return json.loads(run(place, capsys, *arguments, "--json"))["results"]


TEXT_OPTIONS = ("--data", "text.txt", "--context", "32")


def test_together_they_have_the_figures_of_each_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(place, capsys, "llama", *PROGRAMS, *TEXT_OPTIONS, "--json"))
    found = document["results"]
    alone = [results(place, capsys, "llama", program, *TEXT_OPTIONS)[0] for program in PROGRAMS]
    for name in ("program", "nll", "perplexity", "bits_per_byte", "tokens", "windows"):
        assert [row[name] for row in found] == [row[name] for row in alone]
    assert document["visits"]["run"] < document["visits"]["separate"]
    # the time of programs that run together is not their own
    assert "tokens_per_second" in alone[0]
    assert "tokens_per_second" not in found[0]


def test_differences_from_the_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = results(place, capsys, "llama", *PROGRAMS, *TEXT_OPTIONS, "--seed", "7")
    assert "difference" not in first
    ck = deepen.open(place / "llama")
    whole, *rest = (
        deepen.perplexity(ck.apply(text).load(), ck.tokenizer(), TEXT[:400], context=32) for text in PROGRAMS
    )
    for row, evaluation in zip(others, rest, strict=True):
        assert row["difference"] == deepen.paired_difference(evaluation, whole, seed=7).to_json()
    shown = run(place, capsys, "llama", *PROGRAMS, *TEXT_OPTIONS, "--seed", "7").splitlines()
    moved = others[0]["difference"]
    assert "nats/token - first" in shown[0]
    assert "tokens/s" not in shown[0]
    assert f"{moved['value']:+.4f}" in shown[2]
    assert f"{moved['low']:+.4f} to {moved['high']:+.4f}" in shown[2]


def test_one_window_has_a_difference_without_interval(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("llama", *PROGRAMS, *TEXT_OPTIONS, "--tokens", "32")
    assert results(place, capsys, *options)[1]["difference"]["low"] is None
    assert "one window" in run(place, capsys, *options)


def test_without_a_causal_head_each_by_itself(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(place, capsys, "bert", "0-5", "0-4", *TEXT_OPTIONS)
    assert [row["kind"] for row in found] == ["kl", "kl"]
    assert found[0]["value"] == pytest.approx(0, abs=1e-6)
    assert found[1]["value"] > 0
    assert "difference" not in found[1]


def test_speed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(place, capsys, "llama", "0-5", "0", "--speed", "--context", "20")
    assert [(row["speed"]["prompt"], row["speed"]["new"]) for row in found] == [(10, 10)] * 2
    assert all(row["speed"]["peak"] > 0 and row["speed"]["decode"] > 0 for row in found)
    shown = run(place, capsys, "llama", "--speed", "--context", "20")
    for words in ("prefill", "decode", "peak memory", "a prompt of 10 tokens, 10 new ones", "memory: "):
        assert words in shown


def test_tasks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(place, capsys, "llama", "0-5", "0", "--tasks", "words.yaml", "--limit", "1")
    for row, program in zip(found, ("0-5", "0"), strict=True):
        ck = deepen.open(place / "llama").apply(program)
        scores = deepen.evaluate_tasks(ck, [str(place / "words.yaml")], limit=1)
        assert row["tasks"] == [score.to_json() for score in scores]
    lines = run(place, capsys, "llama", "0-5", "0", "--tasks", "words.yaml", *TEXT_OPTIONS).splitlines()
    assert "perplexity" in lines[0]
    assert sum("words" in line and "acc" in line for line in lines) == 4


BAD = {
    "nothing": ([], 2, "--data FILE, --tasks NAME or --speed"),
    "a limit of nothing": (["--data", "text.txt", "--limit", "3"], 2, "--limit and --shots"),
    "no document": (["--tasks", "words.yaml", "--limit", "0"], 2, "limit=0"),
    "no such file": (["--tasks", "absent.yaml"], 1, "absent.yaml: cannot be read"),
    "the same twice": (["--tasks", "words.yaml, words.yaml"], 2, "named once"),
    "only commas": (["--tasks", ","], 2, "at least one"),
    "too long": (["--speed"], 2, "512 tokens"),
    "too short": (["--speed", "--context", "3"], 2, "new=1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, status, words = BAD[name]
    monkeypatch.chdir(place)
    assert main(["eval", "llama", *arguments]) == status
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_logits_that_are_not_finite_name_the_program(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint(place / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.mlp.down_proj.weight"] *= torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (text, *options) = TEXT_OPTIONS
    arguments = [str(folder), "0-3 5", "0-5", text, str(place / options[0]), *options[1:]]
    assert main(["eval", *arguments]) == 1
    assert "0-5: the logits are not finite" in capsys.readouterr().err
