"""Healing by several processes against one: losses, weights, states that each reads of the other, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import deepen
from deepen.errors import UsageError
from deepen.train.distributed import Processes
from deepen.train.heal import Mode
from deepen.train.log import Entry
from deepen.train.recipe import Recipe
from deepen.train.stops import Stopped
from tests.cli.models import TEXT, checkpoint
from tests.train.several_processes import ROOT, apart

PROGRAM = "0-1 (2-3)*2 @end"
RECIPE = Recipe(steps=6, batch=4, accumulate=1, lr=3e-3, eval_every=3, save_every=0)
OPTIONS = ["--context", "32", "--batch", "4", "--steps", "6", "--lr", "3e-3", "--eval-every", "3", "--save-every", "0",
           "--held-out-tokens", "128", "--json"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("heal-together")
    checkpoint(made / "model", bos=True)
    (made / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    return made


def heal(folder: Path, out: Path, count: int, *more: str) -> dict[str, object]:
    """Heals the tiny model by so many processes; what the command printed."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    told = [str(folder / "model"), PROGRAM, "--data", str(folder / "text.txt"), "-o", str(out), *OPTIONS, *more]
    done = subprocess.run(
        [sys.executable, *start, "-m", "deepen", "heal", *told], cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # one document: the others print nothing
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--distil", "0.5", "--distil-hidden", "0.1", "--teacher", "model", "--teacher-program", "0-5 @end"],
        ["--mode", "lora", "--rank", "4", "--accumulate", "2", "--gradient-checkpointing"],
    ],
)
def test_two_processes_heal_as_one_does(folder: Path, tmp_path: Path, more: list[str]) -> None:
    one, two = (heal(folder, tmp_path / str(count), count, *more) for count in (1, 2))
    assert one["steps"] == two["steps"] == 6
    assert apart(tmp_path / "1", tmp_path / "2", "heal.jsonl") < 1e-5
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(tmp_path / "2" / "model.safetensors")
    assert max(float((before[name] - after[name]).abs().max()) for name in after if name in before) > 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.slow
def test_healing_goes_on_with_another_number_of_processes(folder: Path, tmp_path: Path) -> None:
    def report(entry: Entry) -> None:
        if entry.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    heal(folder, tmp_path / "whole", 1)
    with pytest.raises(Stopped):
        deepen.heal(
            deepen.open(folder / "model").apply(PROGRAM), TEXT * 3, tmp_path / "parts", recipe=RECIPE, context=32,
            held_out_tokens=128, report=report,
        )  # fmt: skip
    heal(folder, tmp_path / "parts", 2, "--resume")
    assert apart(tmp_path / "whole", tmp_path / "parts", "heal.jsonl") < 1e-5


@pytest.mark.parametrize(
    ("processes", "mode", "message"),
    [
        (Processes(count=3), "full", "4 rows cannot be shared equally by 3 processes in 1 pieces"),
        (Processes(count=2, how="fsdp"), "full", "healing needs whole ones"),
        (Processes(count=2), "spu", "--mode spu chooses what it trains by what one process computes, and 2 processes"),
    ],
)
def test_what_several_processes_cannot_heal_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, processes: Processes, mode: Mode, message: str
) -> None:
    ck = deepen.open(folder / "model").apply(PROGRAM)
    with pytest.raises(UsageError, match=message):
        deepen.heal(ck, TEXT, tmp_path / "out", recipe=RECIPE, mode=mode, processes=processes)
    assert not list(tmp_path.iterdir())
