"""A run that is killed at any moment ends with the same bits as one that is not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.state import latest
from tests.train.killed_run import RECIPE
from tests.train.text_model import Bag, counting

ROOT = Path(__file__).parents[2]


def start(folder: Path, seconds: float) -> int:
    """Runs until killed or done; returns the exit status."""
    command = [sys.executable, "-m", "tests.train.killed_run", str(folder), str(seconds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False).returncode


def kill_and_compare(folder: Path, kills: int) -> None:
    draw = random.Random(kills)
    steps = []
    for _ in range(kills):
        assert start(folder, draw.uniform(0.1, 0.35)) == -signal.SIGKILL
        steps.append(latest(folder) or 0)
    assert start(folder, 0) == 0
    assert steps == sorted(steps)
    assert steps[-1] > 0
    undisturbed = Bag(dropout=0.2)
    train(undisturbed, counting(), RECIPE, loss=CrossEntropy())
    result = load_file(folder / "result.safetensors")
    for name, parameter in undisturbed.named_parameters():
        assert torch.equal(result[name], parameter), name
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_two_kills(tmp_path: Path) -> None:
    kill_and_compare(tmp_path / "run", 2)


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    kill_and_compare(tmp_path / "run", 10)
