"""Several processes against one: losses, weights, states that each reads of the other, and what stops all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.tasks.batch import IGNORED, Batch
from deepen.train.distributed import Processes, joined
from deepen.train.learner import Learner, TaskLoss
from deepen.train.log import Entry
from deepen.train.recipe_run import run_recipe
from deepen.train.stops import Stopped
from tests.train.recipes import recipe
from tests.train.several_processes import ROOT, apart, run

LOOPED: dict[str, Any] = {
    "stack__layers": 4,
    "stack__program": "0 (1-2)*3 3",
    "train__steps": 6,
    "train__evaluate": 0,
}
FSDP: dict[str, Any] = {**LOOPED, "train__parallel": "fsdp"}


def job(output: Path, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"recipe": recipe(**changes).plain(), "output": str(output), **more}


def stopped(output: Path, changes: dict[str, Any]) -> None:
    """One process that gets SIGTERM in its third step."""

    def report(entry: Entry, _: int) -> None:
        if entry.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        run_recipe(recipe(**changes), output, report=report)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    before = Stack(StackConfig.model_validate({"vocabulary": 6, **recipe(**LOOPED).stack}), seed=0)
    trained = run_recipe(recipe(**LOOPED), tmp_path / "one").stack
    assert run(tmp_path, [job(tmp_path / "two", LOOPED)]) == [(0, ["done"])] * 2
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6
    moved = (each.layers[1].f.sublayer.state_dict() for each in (before, trained))
    assert all((old - new).abs().max() > 1e-3 for old, new in zip(*(each.values() for each in moved), strict=True))


@pytest.mark.slow
def test_two_processes_that_hold_shares_train_as_one_does(tmp_path: Path) -> None:
    run_recipe(recipe(**LOOPED), tmp_path / "one")
    again = {"train__checkpointing": True, "train__batch": 8, "train__accumulate": 2}
    run_recipe(recipe(**LOOPED, **again), tmp_path / "again")
    jobs = [job(tmp_path / "two", FSDP), job(tmp_path / "again-2", {**FSDP, **again})]
    assert run(tmp_path, jobs) == [(0, ["done", "done"])] * 2
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6
    assert apart(tmp_path / "again", tmp_path / "again-2") < 1e-6


def test_the_shares_of_a_batch_have_its_gradient_though_they_ask_for_different_numbers() -> None:
    learner = Learner(Stack(StackConfig(layers=1, width=8, heads=1, vocabulary=9)))
    inputs, targets = torch.randint(0, 9, (2, 8, 6))
    targets[0], targets[3:5, 1:] = IGNORED, IGNORED
    batch = Batch(inputs=inputs, targets=targets)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        learner.zero_grad()
        loss.backward()
        return learner.stack.layers[0].a.sublayer.qkv.weight.grad.clone()

    wanted = gradient(TaskLoss()(learner, batch))
    shares = [Processes(rank=rank, count=2).share(batch, 2) for rank in range(2)]
    # in each piece, which has draws of its own, the first process has the rows before those of the second
    assert torch.equal(torch.cat([share[piece].inputs for piece in range(2) for share in shares]), inputs)
    found = [gradient(torch.stack([TaskLoss()(learner, piece) for piece in share]).mean()) for share in shares]
    assert torch.allclose((found[0] + found[1]) / 2, wanted, atol=1e-6)
    assert not torch.allclose(found[0], wanted, atol=1e-4)
    with pytest.raises(UsageError, match="8 rows cannot be shared equally by 3 processes in 1 pieces"):
        Processes(count=3).share(batch, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__batch": 6, "train__accumulate": 2}, "6 rows cannot be shared equally by 2 processes in 2 pieces"),
        ({"train__optimiser": "muon", "train__parallel": "fsdp"}, "fsdp gives each .* and train.optimiser needs whole"),
        ({"grow": [{"at": 3}], "train__parallel": "fsdp"}, "and grow needs whole ones; choose ddp"),
        ({"log": {"rotation": True}, "train__parallel": "fsdp"}, "and log.rotation needs whole ones"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made = recipe(**changes)
    with pytest.raises(UsageError, match=message):
        run_recipe(made, tmp_path / "out", processes=Processes(count=2, how=made.train.parallel))
    assert not list(tmp_path.iterdir())


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu", "fsdp") as processes:
        assert (processes.count, processes.first, processes.sharded) == (1, True, False)
        assert processes.largest(3) == 3
        assert processes.by_first(lambda: 4) == 4


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    run_recipe(recipe(**LOOPED), tmp_path / "whole")
    background = {"train__async_save": True}
    stopped(tmp_path / "1-ddp", {**LOOPED, **background})
    stopped(tmp_path / "1-fsdp", LOOPED)
    found = run(
        tmp_path,
        [
            job(tmp_path / "1-ddp", LOOPED, resume=True),
            job(tmp_path / "1-fsdp", FSDP, resume=True),
            # each process is asked to stop in turn
            job(tmp_path / "ddp-1", {**LOOPED, **background}, stop=4),
            job(tmp_path / "fsdp-1", {**FSDP, **background}, stop=4),
            job(tmp_path / "fsdp-ddp", FSDP, stop=3),
            job(tmp_path / "fsdp-ddp", LOOPED, resume=True),
        ],
    )
    assert [status for status, _ in found] == [0, 0]
    for _, lines in found:
        assert [line.partition(":")[0] for line in lines] == ["done"] * 2 + ["Stopped"] * 3 + ["done"]
    for name in ("ddp-1", "fsdp-1"):
        states = [path.name for path in (tmp_path / f"{name}.training").iterdir() if path.is_dir()]
        assert states == ["step-00000004"]
        run_recipe(recipe(**LOOPED), tmp_path / name, resume=True)
    for name in ("1-ddp", "1-fsdp", "ddp-1", "fsdp-1", "fsdp-ddp"):
        assert apart(tmp_path / "whole", tmp_path / name) < 1e-6, name


@pytest.mark.slow
def test_two_processes_share_what_else_a_recipe_says(tmp_path: Path) -> None:
    pieces = {"train__batch": 8, "train__accumulate": 2, "train__evaluate": 3}
    several = {
        "everything": {**LOOPED, **pieces, "stack__program": "0-3", "train__optimiser": "muon", "train__noise": 0.01,
                       "stack__wiring": {"name": "layer-drop", "drop": 0.4}, "log": {"rotation": True},
                       "grow": [{"at": 4, "factor": 2, "warmup": 1}]},
        "dropped": {**FSDP, **pieces, "stack__program": "0-3", "stack__wiring": {"name": "layer-drop", "drop": 0.4}},
        "counts": {**FSDP, "stack__program": "0 (1-2)*1..3 3", "depth": {"turns": {"mean": 2}}},
        "after": {**FSDP, "stack__wiring": "sandwich"},
    }  # fmt: skip
    for name, changes in several.items():
        run_recipe(recipe(**changes), tmp_path / name)
    found = run(tmp_path, [job(tmp_path / f"{name}-2", changes) for name, changes in several.items()])
    assert found == [(0, ["done"] * len(several))] * 2
    for name in several:
        assert apart(tmp_path / name, tmp_path / f"{name}-2") < 1e-6, name


@pytest.mark.slow
def test_what_stops_one_process_stops_all(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    found = run(
        tmp_path,
        [
            job(tmp_path / "nan", {**FSDP, "train__rate": 1e30, "train__clip": 1e9}),
            job(tmp_path / "full", LOOPED),
            job(tmp_path / "killed", {**LOOPED, "train__steps": 5000, "train__save": 2}, kill=1.0),
        ],
    )
    for (_, lines), own in zip(found, (True, False), strict=True):
        assert lines[0].startswith("NotFinite: step ")
        assert "exists already" in lines[1]
        if not own:
            assert lines[2].startswith("ElsewhereError: another process of the run ended")
    assert found[0][0] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_kill_9_while_states_are_written_in_the_background_leaves_the_last_whole(tmp_path: Path, count: int) -> None:
    changes = {**LOOPED, "train__steps": 150, "train__save": 1, "train__async_save": True, "stack__width": 64}
    assert run(tmp_path, [job(tmp_path / "whole", changes)], count) == [(0, ["done"])] * count
    resumed = 0
    for number, seconds in enumerate((0.15, 0.4, 0.7)):
        output = tmp_path / f"run-{number}"
        found = run(tmp_path, [job(output, changes, kill=seconds, pause=0.01)], count)
        assert found[0][0] == -signal.SIGKILL
        # the first may be killed before there is a state
        states = bool(list(output.with_name(f"{output.name}.training").glob("step-*")))
        resumed += states
        # by as many processes: 150 steps carry the rounding of another number of them far
        assert run(tmp_path, [job(output, changes, resume=states)], count) == [(0, ["done"])] * count
        assert apart(tmp_path / "whole", output) < 1e-12
    assert resumed


@pytest.mark.slow
def test_torchrun_starts_it_and_one_process_prints(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe(**LOOPED).yaml())
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "deepen", "train", "recipe.yaml"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("program") == 1
    assert (tmp_path / "recipe" / "model.safetensors").is_file()
