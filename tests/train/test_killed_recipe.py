"""`deepen train` killed at random moments, and taken up again each time, ends with the same bits as when left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.recipes import recipe

# dropped layers, a growth and a second optimiser: everything that a state must hold
GROWN = recipe(
    stack__wiring="stochastic-depth",
    train__steps=600,
    train__save=2,
    train__evaluate=0,
    train__optimiser="muon",
    grow=[{"at": 0.5, "factor": 2}],
)


def started(where: Path, output: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deepen", "train", str(where), "-o", str(output), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def length(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    where, draw = tmp_path / "recipe.yaml", random.Random(0)
    where.write_text(GROWN.yaml())
    output = tmp_path / "killed"
    log, seen = tmp_path / "killed.training" / "log.jsonl", 0
    for kill in range(10):
        process = started(where, output, *(["--resume"] if kill else []))
        # the clock starts when a step is done, so that no kill falls into the imports
        while length(log) <= seen:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        seen = length(log)
    assert started(where, output, "--resume").wait() == 0
    assert started(where, tmp_path / "alone").wait() == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (output, tmp_path / "alone")]
    assert weights[0] == weights[1]
