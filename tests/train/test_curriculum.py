"""Loops whose count is drawn in each training step, with a mean that rises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import deepen
from deepen.checkpoint.tiny import tiny_checkpoint, tiny_inputs
from deepen.cli import main
from deepen.errors import UsageError
from deepen.train.curriculum import Curriculum, Turns
from deepen.train.log import Entry
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.recipe import Recipe
from tests.cli.models import TEXT, checkpoint
from tests.train.text_model import weights

RISING = Curriculum(mean=4, share=0.5)
RECIPE = Recipe(steps=8, batch=4, accumulate=2, lr=1e-2, warmup=0, eval_every=3, save_every=1)
LOOPED = "0 (1-2)*1..3 (3-4)*2..5 5"


def looped(place: Path) -> Any:
    tiny_checkpoint(place, "llama")
    return deepen.open(place).apply(LOOPED).load()


def test_the_mean_rises_to_its_aim_over_the_share_of_the_steps() -> None:
    assert [RISING.mean_at(step, 20) for step in range(20)] == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4, *[4] * 10]
    late = Curriculum(mean=32, share=0.5, shape="1-sqrt")
    even = Curriculum(mean=32, share=0.5)
    means = [(late.mean_at(step, 1000), even.mean_at(step, 1000)) for step in range(1000)]
    assert means[0] == (1, 1)
    assert means[375] == (16, 24)
    assert means[500:] == [(32, 32)] * 500
    assert all(one <= other for one, other in means)
    assert means == sorted(means)
    assert Curriculum(mean=5, share=0).mean_at(0, 10) == 5


@pytest.mark.parametrize("mean", [1, 4, 32])
def test_the_mean_of_ten_thousand_draws_is_the_aim_and_one(mean: int) -> None:
    flat = Curriculum(mean=mean, share=0)
    draws = [flat.turns_at(step, 10_000, seed=0) for step in range(10_000)]
    assert sum(draws) / len(draws) == pytest.approx(mean + 1, rel=0.03)
    assert min(draws) >= 1
    # the variance of a Poisson number with a log-normal mean: m + m^2 (exp(s^2) - 1)
    spread = sum((draw - mean - 1) ** 2 for draw in draws) / len(draws)
    assert spread == pytest.approx(mean + mean**2 * 0.2840, rel=0.15)


def test_a_draw_depends_on_the_seed_and_the_step_alone() -> None:
    first = [RISING.turns_at(step, 100, 0) for step in range(100)]
    assert [RISING.turns_at(step, 100, 0) for step in reversed(range(100))] == first[::-1]
    assert [RISING.turns_at(step, 100, 1) for step in range(100)] != first


def test_a_step_runs_as_often_as_was_drawn_and_all_else_the_maximum(tmp_path: Path) -> None:
    model = looped(tmp_path / "llama")
    ids = tiny_inputs(model, batch=4)["input_ids"]
    seen: list[dict[int, int]] = []
    entries: list[Entry] = []

    class Watched(CrossEntropy):
        def __call__(self, model: Any, ids: torch.Tensor, /) -> torch.Tensor:
            seen.append(model.deepen.counts["text"])
            return super().__call__(model, ids)

    def evaluate() -> float:
        assert model.deepen.counts["text"] == {0: 3, 1: 5}
        return 0.0

    turns = Turns(model, RISING, steps=8, seed=3, tower="text")
    train(model, lambda _: ids, RECIPE, loss=Watched(), turns=turns, evaluate=evaluate, report=entries.append)
    drawn = [RISING.turns_at(step, 8, 3) for step in range(8)]
    assert [entry.turns for entry in entries] == drawn
    assert len(set(drawn)) > 2
    wanted = [{0: min(max(count, 1), 3), 1: min(max(count, 2), 5)} for count in drawn]
    assert seen[::2] == seen[1::2] == wanted
    assert model.deepen.counts["text"] == {0: 3, 1: 5}
    assert '"turns"' in entries[0].line()


def run(model: Any, folder: Path, mean: int = 4, **more: Any) -> None:
    ids = tiny_inputs(model, batch=4)["input_ids"]
    curriculum = Curriculum(mean=mean, share=0.5)
    turns = Turns(model, curriculum, steps=8, seed=3, tower="text")
    settings = curriculum.settings()
    train(model, lambda _: ids, RECIPE, loss=CrossEntropy(), folder=folder, settings=settings, turns=turns, **more)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    def stop(entry: Entry) -> None:
        if entry.step == 5:
            raise KeyboardInterrupt

    whole, stopped, again = (looped(tmp_path / name) for name in ("whole", "stopped", "again"))
    run(whole, tmp_path / "whole.run")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, tmp_path / "run", report=stop)
    with pytest.raises(UsageError, match="turns_mean was 4, now 5"):
        run(again, tmp_path / "run", mean=5, resume=True)
    run(again, tmp_path / "run", resume=True)
    ends = weights(whole)
    assert all(torch.equal(ends[name], each) for name, each in weights(again).items())


def test_heal_draws_counts_and_logs_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "model", bos=True)
    (tmp_path / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    options = ["--data", str(tmp_path / "text.txt"), "--context", "32", "--batch", "4", "--steps", "12", "--lr", "3e-3"]
    options += ["--held-out-tokens", "128", "--turns", "2", "--turns-share", "0.5"]
    plain = ["heal", str(tmp_path / "model"), "0-1 (2-3)*2", *options, "-o", str(tmp_path / "plain")]
    assert main(plain) == 2
    assert "loops whose count is chosen at run time" in capsys.readouterr().err
    assert not list(tmp_path.glob("plain*"))
    out = tmp_path / "out"
    assert main(["heal", str(tmp_path / "model"), "0-1 (2-3)*1..4", *options, "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["after"]["nll"] < told["before"]["nll"]
    lines = [json.loads(line) for line in (out / "heal.jsonl").read_text().splitlines()]
    curriculum = Curriculum(mean=2, share=0.5)
    assert [line["turns"] for line in lines] == [curriculum.turns_at(step, 12, 0) for step in range(12)]
    assert str(deepen.open(out).program) == "0-1 (2-3)*1..4"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mean": 0}, "--turns 0: expected a mean of 1 turn or more"),
        ({"share": 1.5}, "--turns-share 1.5: expected a share of the steps from 0 to 1"),
        ({"shape": cast("Any", "liner")}, "'liner' is unknown .did you mean 'linear'"),
        ({"spread": 3.0}, "spread of the turns is 3.0"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Curriculum(**{"mean": 4, **changes})


def test_a_program_without_a_run_time_loop_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "llama", "llama")
    model = deepen.open(tmp_path / "llama").apply("0-2 (3-4)*2").load()
    with pytest.raises(UsageError, match=r"such as \(4-7\)\*1\.\.8; `.*` has none"):
        Turns(model, RISING, steps=8, seed=0, tower="text")
