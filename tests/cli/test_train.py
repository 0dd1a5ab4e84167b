"""`deepen train` and `deepen data`, and the folder that comes out as every other command sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import deepen
from deepen.checkpoint.stack_folder import write_stack
from deepen.cli import main
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.tasks.tokens import byte_tokenizer
from tests.train.recipes import COPYING

TEXT = "to be or not to be, that is the question\n" * 60


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(TEXT)
    data: dict[str, Any] = {
        "stack": {"layers": 2, "width": 16, "heads": 2},
        "task": {"name": "text", "source": str(tmp_path / "text"), "context": 16, "held_out_bytes": 100, "ngram": 2},
        "train": {"steps": 6, "batch": 4, "evaluate": 3},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stack of bytes as training leaves it."""
    made = tmp_path / "stack"
    made.mkdir()
    stack = Stack(StackConfig(layers=3, width=16, heads=2, program="0 (1)*2 2", context=64), seed=3)
    write_stack(stack, made, byte_tokenizer().to_str())
    return made


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_recipe_is_trained_told_and_written(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["train", str(recipe), "-o", str(out)]) == 0
    told = capsys.readouterr()
    for words in ("trained", "held out", "bits per byte", "n-gram", "order 2 chosen on dev", f" {out}\n"):
        assert words in told.out
    assert "step 3/6: loss" in told.err
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "recipe.yaml", "log.jsonl"}
    assert main(["run", str(out), "--prompt", "to be", "--tokens", "5"]) == 0
    assert "5 tokens in" in capsys.readouterr().err


def test_json_has_the_result_and_a_sample(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "train", recipe, "-o", tmp_path / "out", "--set", "train.steps=3", "--set", "task.ngram=0")
    assert found["steps"] == 3
    assert found["measure"] == "bits_per_byte"
    assert found["splits"]["held_out"]["bits_per_byte"] > 4
    assert len(found["sample"]) > 20
    assert found["peers"] == {}


def test_wrong_recipes_and_options_are_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, status, message in (
        (["train", recipe, "--set", "stack.wiring={name: hyper-connections, streams: 0}"], 2,
         "stack.wiring.streams: got 0, must be >= 1"),
        (["train", recipe, "--set", "train.stpes=3"], 2, "did you mean 'steps'?"),
        (["train", recipe, "--dtype", "bfloat16"], 2, "--set train.dtype"),
        (["train", tmp_path / "none.yaml"], 2, "No such file"),
        (["train", recipe, "-o", tmp_path], 1, "exists already"),
        (["train", recipe, "-o", tmp_path / "out", "--resume"], 1, "no state of a run there"),
        (["train", recipe, "-o", tmp_path / "out", "--set", "task.source=shakspear"], 1, "did you mean 'shakespeare'?"),
        (["train", recipe, "-o", tmp_path / "out", "--set", "stack.program=0-7"], 1, "layer"),
        (["data", "-o", tmp_path / "ids"], 2, "at least one FILE"),
        (["data", recipe, "-o", tmp_path / "ids", "--held-out", "2"], 2, "--held-out: got 2.0, must be < 1"),
    ):  # fmt: skip
        assert main([str(word) for word in words]) == status
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_prepared_data_is_trained_on(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids"
    found = told(capsys, "data", tmp_path / "text", "-o", ids, "--tokens", "bpe", "--vocabulary", "260")
    assert found["vocabulary"] == 260
    assert sum(found["bytes"].values()) == len(TEXT)
    trained = told(capsys, "train", recipe, "-o", tmp_path / "out", "--set", f"task.source={ids}")
    assert trained["recipe"]["task"]["source"] == str(ids)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["stack"]["vocabulary"] == 260
    assert main(["data", str(tmp_path / "text"), "-o", str(ids)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_other_programs_run_the_same_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = deepen.open(folder)
    ids = torch.randint(0, 256, (2, 9))
    stored = opened.load()(input_ids=ids).logits
    longer = opened.apply("0-2").load()(input_ids=ids).logits
    assert (stored - longer).abs().max() > 1e-4
    assert torch.equal(opened.apply("0 (1)*2 2").load()(input_ids=ids).logits, stored)
    # a copy of a layer is that layer
    assert torch.equal(opened.apply("0 1 1! 2").load()(input_ids=ids).logits, stored)
    shown = told(capsys, "show", folder, "0 2")
    assert shown["towers"][0]["unvisited"] == [1]
    found = told(capsys, "eval", folder, "0 (1)*2 2", "0-2", "--data", __file__, "--context", 32, "--tokens", 96)
    assert [each["program"] for each in found["results"]] == ["0 1*2 2", "0-2"]
    assert found["results"][0]["perplexity"] != found["results"][1]["perplexity"]


def test_what_works_on_models_of_transformers_refuses_a_stack(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", __file__, "--context", "32"]
    for words in (
        ["score", folder, *data],
        ["search", folder, *data, "--budget", "0.7"],
        ["heal", folder, *data, "-o", tmp_path / "healed"],
        ["apply", folder, "0-1", "-o", tmp_path / "cut"],
        ["run", folder, "--prompt", "a", "--counts", "2"],
    ):
        assert main([str(word) for word in words]) == 1
        assert "is a native stack" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stack"]


def test_parameters_of_visits_fit_one_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "stack"
    made.mkdir()
    write_stack(Stack(StackConfig(layers=3, width=16, heads=2, wiring="denseformer")), made, byte_tokenizer().to_str())
    assert main(["run", str(made), "0-1", "--prompt", "a", "--tokens", "2"]) == 1
    assert "belong to the program that they were trained with" in capsys.readouterr().err
    assert main(["run", str(made), "--prompt", "a", "--tokens", "2"]) == 0


def test_a_stack_of_classes_generates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "recipe.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(COPYING))
    assert main(["train", str(path), "-o", str(out)]) == 0
    assert main(["run", str(out), "--prompt", "a"]) == 1
    assert "its tokens are no text" in capsys.readouterr().err
