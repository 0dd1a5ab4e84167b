"""Recipes trained by several processes: `RANK=0 WORLD_SIZE=2 ... python -m tests.train.several_processes JOBS.json`.

Each job says `recipe` and `output`, and where wanted `resume`, and `stop`: the step after which the first process gets
SIGTERM, or `kill`: how many seconds after the first step it is killed. The error of a job is printed as a line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def run(folder: Path, jobs: list[dict[str, Any]], count: int = 2) -> list[tuple[int, list[str]]]:
    """Does jobs one after another, each by all of so many processes.

    Returns:
        Of each process its exit status, and the lines that it printed.
    """
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.several_processes", str(path)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(count)
    ]  # fmt: skip
    found = []
    try:
        for each in started:
            out, err = each.communicate(timeout=200)
            sys.stderr.write(err)
            found.append((each.returncode, out.splitlines()))
    finally:
        # of processes that wait for each other without end
        for each in started:
            each.kill()
    return found


def apart(a: Path, b: Path, log: str = "log.jsonl") -> float:
    """How far the weights and the logged losses of two runs are from each other, at most."""
    ours, other = (load_file(each / "model.safetensors") for each in (a, b))
    assert ours.keys() == other.keys()
    logs = [[json.loads(line) for line in (each / log).read_text().splitlines()] for each in (a, b)]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    losses = [abs(one["loss"] - two["loss"]) for one, two in zip(*logs, strict=True)]
    return max(*losses, *(float((ours[name] - other[name]).abs().max()) for name in ours))


def main(path: Path) -> None:
    # heavy to import, and of no use to those who only start others
    from deepen.errors import DeepenError
    from deepen.train.distributed import Processes, joined
    from deepen.train.log import Entry
    from deepen.train.recipe_file import RecipeFile
    from deepen.train.recipe_run import run_recipe

    def do(job: Any, recipe: RecipeFile, processes: Processes) -> None:
        def report(entry: Entry, _: int) -> None:
            if entry.step == 1 and "kill" in job:
                threading.Timer(job["kill"], os.kill, (os.getpid(), signal.SIGKILL)).start()
            if entry.step == job.get("stop"):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(job.get("pause", 0))

        run_recipe(recipe, job["output"], resume=job.get("resume", False), report=report, processes=processes)

    with joined() as processes:
        for job in json.loads(path.read_text()):
            recipe = RecipeFile.of(job["recipe"])
            try:
                do(job, recipe, replace(processes, how=recipe.train.parallel))
                print("done", flush=True)
            except DeepenError as error:
                print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    from deepen.train.distributed import ElsewhereError

    try:
        main(Path(sys.argv[1]))
    except ElsewhereError as gone:
        print(f"ElsewhereError: {gone}", flush=True)
