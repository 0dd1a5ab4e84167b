"""A run in a process of its own that kills itself after a while: `python -m tests.train.killed_run FOLDER SECONDS`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from safetensors.torch import save_file

from deepen.train.log import Entry
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.recipe import Recipe
from deepen.train.state import latest
from tests.train.text_model import Bag, counting, weights

RECIPE = Recipe(steps=600, batch=4, lr=1e-2, warmup=5, eval_every=0, save_every=3, seed=3)


def main(folder: Path, seconds: float, pause: float = 0.004) -> None:
    model = Bag(dropout=0.2)
    kill = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))

    def report(_: Entry) -> None:
        # from the first step on, so that the time is not spent on imports
        if seconds and not kill.is_alive():
            kill.start()
        time.sleep(pause)

    train(
        model,
        counting(),
        RECIPE,
        loss=CrossEntropy(),
        folder=folder,
        resume=latest(folder) is not None,
        report=report,
    )
    save_file(weights(model), folder / "result.safetensors")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
