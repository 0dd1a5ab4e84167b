"""The log of a run: one JSON line a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from deepen.checkpoint.atomic import atomic_file
from deepen.errors import SaveError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One step.

    Attributes:
        step: updates done, this one included.
        loss: of the batch before the update, in nats.
        lr: the learning rate.
        grad_norm: of the whole gradient, before it is clipped.
        tokens_per_second: that were trained on in this step.
        turns: that were drawn for run-time loops, where they are.
        held_out: the loss on the held-out data after the update, in nats a token, where it was looked at.
        measures: what else was found then, by name.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    turns: int | None = None
    held_out: float | None = None
    measures: Mapping[str, float] | None = None

    def line(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields) + "\n"


class Log:
    """A file that gets a line a step.

    Args:
        path: the file.
        step: the step that the run goes on from; lines after it, of a run that was killed, are taken out.

    Raises:
        SaveError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in _lines(path) if _step(line) <= step]
        with atomic_file(path) as file:
            file.writelines(kept)
        self.path = path
        self._file: IO[str] = path.open("a", encoding="utf-8", newline="\n")

    def write(self, entry: Entry) -> None:
        try:
            self._file.write(entry.line())
            self._file.flush()
        except OSError as error:
            raise SaveError(
                f"cannot write {self.path} at step {entry.step}: {error.strerror}; make room and resume: the last "
                "state that was saved is whole"
            ) from error

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []


def _step(line: str) -> float:
    """The step of a line; that of one cut short by a kill comes after all others."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
