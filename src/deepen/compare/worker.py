"""A process that trains runs one after the other, each in a fork of itself, so that a run imports nothing anew.

    parent   a line of JSON for each run     {"folder": ..., "models": ...}
    worker   a line of JSON back             what was wrong, or ""

Importing torch and what its optimisers import takes seconds, which short runs would spend again and again. A run keeps
a process of its own: its peak of memory is its own, and one that dies takes no other with it. When its input ends, also
because its parent was killed, a worker stops the run it is at, whose state is saved, and ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from deepen.compare.run import execute
from deepen.errors import DeepenError

# Seconds that a run has to save its state when it is to stop.
GRACE = 30


class Worker:
    """The parent's side.

    Args:
        threads: that each run computes with.
    """

    def __init__(self, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        # signals of the terminal come to the parent alone, which stops runs in order
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepen.compare.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip

    def run(self, folder: Path, models: bool) -> str:
        """Trains the recipe of a folder; what was wrong, or nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"folder": str(folder), "models": models}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        return json.loads(answer) if answer else self._last_words()

    def stop(self) -> None:
        """Asks it to stop the run it is at, if any, and to end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Waits for its end after `stop`, not for ever."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        status = self._process.wait()
        if self._errors.closed:
            return "stopped"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its worker ended with status {status}"


def serve() -> None:
    """The worker's side."""
    # optimisers import it when the first one is made
    import torch._dynamo  # noqa: F401

    # what a run prints is not an answer
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        while line := sys.stdin.readline():
            job = json.loads(line)
            answers.write(json.dumps(_forked(Path(job["folder"]), job["models"])) + "\n")
            answers.flush()


def _forked(folder: Path, models: bool) -> str:
    """Trains in a fork; what was wrong, or nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _train(folder, models, writer)
    os.close(writer)
    watched, told = [reader, 0], b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready:
            # nothing is asked while a run is on: the parent is gone, or wants it to stop
            os.kill(pid, signal.SIGTERM)
            watched.remove(0)
        if reader in ready:
            piece = os.read(reader, 4096)
            if not piece:
                break
            told += piece
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return told.decode() or (f"ended with status {os.waitstatus_to_exitcode(status)}" if status else "")


def _train(folder: Path, models: bool, writer: int) -> None:
    """The fork: trains, says what was wrong, and is gone."""
    told = ""
    try:
        execute(folder, models=models)
    except DeepenError as error:
        told = " ".join(str(error).split())
    # whatever it is belongs to this run alone
    except BaseException as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    os.write(writer, told.encode())
    os._exit(0)


if __name__ == "__main__":
    serve()
