"""Runs of recipes: what they reach, and that a run which was stopped ends with the same bits as one that was not."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from deepen.errors import SaveError, UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.tasks.batch import IGNORED, Batch
from deepen.train.growth import Stage
from deepen.train.learner import Learner, TaskLoss, measured
from deepen.train.length import spent_flops, steps_of, token_flops
from deepen.train.log import Entry
from deepen.train.recipe_file import RecipeFile
from deepen.train.recipe_run import run_recipe
from deepen.train.stops import NotFinite, Stopped
from tests.train.recipes import recipe

FULL: dict[str, Any] = {
    "train__optimiser": "muon",
    "train__noise": 0.01,
    "stack__wiring": {"name": "layer-drop", "drop": 0.2},
    "grow": [{"at": 5, "factor": 2, "warmup": 2}],
    "depth": {"dropping": 0.5},
    "log": {"rotation": True},
}
GROWN: dict[str, Any] = {"grow": [{"at": 3, "factor": 2}]}
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_stack_learns_to_copy() -> None:
    untrained = run_recipe(recipe(train__steps=1, train__rate=1e-9))
    trained = run_recipe(recipe(train__steps=400, train__batch=16, train__optimiser="muon", train__rate=1e-2))
    assert trained.splits["test"]["exact_match"] > 0.9 > untrained.splits["test"]["exact_match"] + 0.3
    assert trained.score == trained.splits["test"]["exact_match"]
    assert [point["step"] for point in trained.curve] == list(range(6, 401, 6))


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(7, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = run_recipe(recipe(**FULL), tmp_path / "whole")

    def report(entry: Entry, _: int) -> None:
        if entry.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="go on with --resume"):
        run_recipe(recipe(**FULL), tmp_path / "out", report=report)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="holds the state of a run"):
        run_recipe(recipe(**FULL), tmp_path / "out")
    with pytest.raises(UsageError, match=r"train\.rate was 0\.003, now 0\.01"):
        run_recipe(recipe(**FULL, train__rate=0.01), tmp_path / "out", resume=True)
    resumed = run_recipe(recipe(**FULL), tmp_path / "out", resume=True)
    assert whole.stack.config.layers == 4
    for name, tensor in whole.stack.state_dict().items():
        assert torch.equal(resumed.stack.state_dict()[name], tensor), name
    logs = [
        [
            {**json.loads(line), "tokens_per_second": 0}
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "out")
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(1, 13))
    assert "rotation.3" in logs[0][5]["measures"]
    assert not (tmp_path / "out.training").exists()


def test_the_folder_holds_the_stack_the_recipe_and_the_result(tmp_path: Path) -> None:
    outcome = run_recipe(recipe(train__tokens=300, train__steps=None), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["splits"] == outcome.splits
    assert found["steps"] == found["recipe"]["train"]["steps"] == outcome.steps
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["stack.layers.0.a.norm.weight"], outcome.stack.layers[0].a.norm.weight)
    with pytest.raises(SaveError, match="exists already"):
        run_recipe(recipe(), tmp_path / "out")


def test_growth_moves_the_loss_to_that_of_the_deeper_stack_and_training_goes_on() -> None:
    outcome = run_recipe(recipe(grow=[{"at": 0.5, "factor": 3, "order": "interleaved"}]))
    assert outcome.stack.config.layers == 6
    assert outcome.parameters == sum(each.numel() for each in outcome.stack.parameters())
    plain = run_recipe(recipe())
    assert outcome.flops > plain.flops
    with pytest.raises(UsageError, match=r"grow\.0\.at: got 12, the run has 12 steps"):
        run_recipe(recipe(grow=[{"at": 12}]))
    with pytest.raises(UsageError, match="is not after step 6"):
        run_recipe(recipe(grow=[{"at": 6}, {"at": 6}]))


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_place() -> None:
    with pytest.raises(NotFinite, match=r"step \d+: .*Lower train\.rate or train\.clip"):
        run_recipe(recipe(train__rate=1e30, train__clip=1e9))


def test_the_loss_of_pieces_is_that_of_the_whole_though_they_ask_for_different_numbers() -> None:
    learner = Learner(Stack(StackConfig(layers=1, width=8, heads=1, vocabulary=9)))
    inputs = torch.randint(0, 9, (4, 6))
    targets = torch.randint(0, 9, (4, 6))
    targets[0], targets[3, 1:] = IGNORED, IGNORED
    batch = Batch(inputs=inputs, targets=targets)
    pieces = batch.chunk(2)
    mean = sum(TaskLoss()(learner, piece) for piece in pieces) / 2
    assert torch.allclose(TaskLoss()(learner, batch), mean, atol=1e-6)
    logits = learner(inputs).logits
    plain = torch.stack([-logits[i, j].log_softmax(-1)[targets[i, j]] for i in range(4) for j in range(6)
                         if targets[i, j] != IGNORED]).mean()  # fmt: skip
    assert torch.allclose(TaskLoss()(learner, batch), plain, atol=1e-5)


def test_measures_count_targets_rows_and_bytes() -> None:
    class Known(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            logits = torch.nn.functional.one_hot(inputs, 5).float() * 3
            return type("Result", (), {"logits": logits})()

    inputs = torch.tensor([[1, 2, 3], [4, 0, 1]])
    targets = torch.tensor([[1, 2, IGNORED], [4, 0, 2]])
    rows = [Batch(inputs=inputs[:1], targets=targets[:1]), Batch(inputs=inputs[1:], targets=targets[1:])]
    found = measured(Known(), rows, device=CPU)
    right, wrong = -torch.tensor([3.0, 0, 0, 0, 0]).log_softmax(0)[:2].double()
    assert found == pytest.approx({"loss": float(4 * right + wrong) / 5, "accuracy": 0.8, "exact_match": 0.5}, rel=1e-5)
    text = measured(Known(), [Batch(inputs=inputs, targets=targets, bytes=10)], device=CPU)
    assert text["bits_per_byte"] == pytest.approx(float(4 * right + wrong) / 10 / 0.6931472, rel=1e-5)
    assert "exact_match" not in text


def test_tokens_flops_and_minutes_become_steps() -> None:
    stack = Stack(StackConfig(layers=2, width=16, heads=2, vocabulary=8))

    def steps(**train: Any) -> int:
        given = recipe(**{f"train__{name}": value for name, value in {"steps": None, **train}.items()})
        calls = list[str]()
        found = steps_of(
            given,
            stack,
            row_length=10,
            targets=40,
            step=lambda: calls.append("step"),
            look=lambda: calls.append("look"),
        )
        assert bool(calls) == ("minutes" in train)
        return found

    assert steps(tokens=400) == 10
    one = 3 * token_flops(stack, 10) * 4 * 10
    assert steps(flops=10.5 * one) == 10
    assert spent_flops(stack, (), 10, 10, 4) == pytest.approx(10 * one)
    grows = (Stage(step=6, factor=2, order="whole", carry=True),)
    twice = 3 * token_flops(stack, 10, 2) * 4 * 10
    assert spent_flops(stack, grows, 10, 10, 4) == pytest.approx(6 * one + 4 * twice)
    assert spent_flops(stack, grows, 4, 10, 4) == pytest.approx(4 * one)
    assert steps(minutes=1) > 1
    with pytest.raises(UsageError, match=r"train\.tokens: 39 is less than one step, of which 0.97 fit"):
        steps(tokens=39)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "stack"),
    [({"name": "images", "source": "digits"}, {"patch": 2, "positions": "learned"}), ({"name": "text"}, {})],
    ids=["images", "text"],
)
def test_images_and_text_are_trained_by_the_same_loop(tmp_path: Path, task: Any, stack: Any) -> None:
    if task["name"] == "text":
        (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 200)
        task = {**task, "source": str(tmp_path / "text"), "context": 16, "held_out_bytes": 300, "ngram": 3}
    outcome = run_recipe(recipe(task=task, stack={"layers": 2, "width": 24, "heads": 2, **stack}, train__steps=200,
                                train__batch=16, train__optimiser="muon", train__rate=1e-2))  # fmt: skip
    if task["name"] == "text":
        assert outcome.splits["held_out"]["bits_per_byte"] < 3
        assert outcome.peers["ngram_bits_per_byte"] < 1
    else:
        assert outcome.splits["test"]["accuracy"] > 0.5


def test_products_in_bfloat16_are_near_and_the_weights_stay_whole() -> None:
    plain, half = (run_recipe(recipe(train__steps=4, train__dtype=dtype)) for dtype in ("float32", "bfloat16"))
    losses = [run.splits["test"]["loss"] for run in (plain, half)]
    assert 0 < abs(losses[0] - losses[1]) < 0.02 * losses[0]
    assert {parameter.dtype for parameter in half.stack.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_compiled_run_ends_where_a_plain_one_does(tmp_path: Path) -> None:
    plain = run_recipe(recipe(train__steps=6, **GROWN))
    compiled = run_recipe(recipe(train__steps=6, train__compile=True, **GROWN), tmp_path / "out")
    found = compiled.stack.state_dict()
    for name, tensor in plain.stack.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_of_the_repository_runs(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["train"] = {**data["train"], "steps": 4, "batch": 4, "evaluate": 2, "save": 0}
    data["train"].pop("minutes", None)
    data["task"].pop("ngram", None)
    outcome = run_recipe(RecipeFile.of(data))
    assert outcome.steps == 4
    assert math.isfinite(outcome.score)
