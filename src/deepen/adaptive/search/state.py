"""What a search has found so far: a JSON file that is replaced whole after every round of evaluations.

The file holds how the search was set up and every candidate evaluated, by the normal form of its program. A search is
continued by running its method again from the start with the same seed: what the file holds is not evaluated again, so
the method takes the way it took before, and goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.atomic import atomic_file
from deepen.errors import DataError, UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

FORMAT = 1
# Of each weight file this many pieces of this many bytes tell one model from another.
PIECES, PIECE = 16, 4096


@dataclass(frozen=True)
class Candidate:
    """An evaluated program: its loss on the text that is searched on, in nats, and its cost."""

    program: str
    nll: float
    cost: float


@dataclass
class State:
    """The candidates of a search by program, in the order in which they were asked for.

    Attributes:
        setup: what the result depends on.
        path: the file; None keeps nothing.
        candidates: by the normal form of the program.
        result: the figures of the end, empty before.
    """

    setup: Mapping[str, Any]
    path: Path | None = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)

    def add(self, found: list[Candidate]) -> None:
        """Keeps some candidates and writes the file."""
        self.candidates |= {candidate.program: candidate for candidate in found}
        self.write()

    def write(self) -> None:
        """Replaces the file."""
        if self.path is None:
            return
        rows = [[one.program, one.nll if math.isfinite(one.nll) else None, one.cost] for one in self._all()]
        document = {"format": FORMAT, "setup": dict(self.setup), "result": dict(self.result), "candidates": rows}
        with atomic_file(self.path) as file:
            json.dump(document, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")

    def _all(self) -> list[Candidate]:
        return list(self.candidates.values())


def read_state(path: Path, setup: Mapping[str, Any]) -> State:
    """The state in a file, to be continued.

    Raises:
        DataError: the file cannot be read, or is no state of a search.
        UsageError: it is that of another search; what differs is named.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["candidates"]
        stored = document["setup"]
        found = {
            text: Candidate(text, math.inf if nll is None else float(nll), float(cost)) for text, nll, cost in rows
        }
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; leave out --resume to begin anew") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the state of a search; name another file with --out") from error
    if document.get("format") != FORMAT:
        raise DataError(f"{path}: format {document.get('format')!r}, expected {FORMAT}; begin anew in another file")
    current = json.loads(json.dumps(dict(setup)))
    differs = [
        f"{name} was {stored.get(name)}, now it is {current.get(name)}"
        for name in sorted(current.keys() | stored.keys())
        if stored.get(name) != current.get(name)
    ]
    if differs:
        raise UsageError(f"{path} holds another search: {'; '.join(differs)}; use the same options or another --out")
    return State(setup, path, found)


def fingerprint(ck: Checkpoint) -> str:
    """What tells a checkpoint from others: names, shapes, program, and samples from its weight files."""
    made = hashlib.sha256()
    made.update(str(ck.program).encode())
    for name, info in sorted(ck.source.infos.items()):
        made.update(f"{name} {info.dtype} {info.shape}\n".encode())
    for path in ck.source.files:
        size = path.stat().st_size
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(max(0, size - PIECE) * piece // (PIECES - 1))
                made.update(file.read(PIECE))
    return made.hexdigest()[:16]


def text_digest(text: str) -> str:
    """What tells a text from others."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
