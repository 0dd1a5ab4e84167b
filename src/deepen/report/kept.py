"""Results that commands keep in a folder: one JSON document a command, which a report is made of.

deepen score MODEL --data text.txt --keep study     ->  study/score.json
deepen search MODEL --data text.txt ... --keep study ->  study/search.json, study/search-2.json ...
deepen report study                                  ->  study/index.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepen import __version__
from deepen.checkpoint.atomic import atomic_file
from deepen.errors import DataError, SaveError

FORMAT = 1
KINDS = ("show", "score", "search", "eval", "compare", "run")


@dataclass(frozen=True)
class Kept:
    """One result.

    Attributes:
        kind: the command that made it, one of `KINDS`.
        command: the whole command, ready for a shell.
        path: its file.
        document: what the command prints with --json.
    """

    kind: str
    command: str
    path: Path
    document: Mapping[str, Any]


def keep(folder: Path, kind: str, command: str, document: Mapping[str, Any]) -> Path:
    """Writes a result to a new file of a folder, which is made.

    Raises:
        SaveError: the folder or file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"--keep {folder}: cannot make this folder: {error.strerror}; give another") from error
    names = (f"{kind}.json" if at == 1 else f"{kind}-{at}.json" for at in range(1, 10_000))
    path = next(folder / name for name in names if not (folder / name).exists())
    write_kept(path, kind, command, document)
    return path


def write_kept(path: Path, kind: str, command: str, document: Mapping[str, Any]) -> None:
    """Writes a result to a file, in the place of an older one.

    Raises:
        SaveError: it cannot be written.
    """
    stated = {"format": FORMAT, "kind": kind, "command": command, "version": __version__}
    with atomic_file(path) as file:
        json.dump({"kept": stated, **document}, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")


def read_kept(folder: Path) -> list[Kept]:
    """The results in a folder, in the order of `KINDS` and of their making; other files are none of its business.

    Raises:
        DataError: no such folder, no result in it, or a result that cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; keep results there first: deepen score ... --keep {folder}")
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not readable as JSON: {error}; move it away or keep the result anew") from error
        stated = document.get("kept") if isinstance(document, dict) else None
        if not isinstance(stated, dict) or stated.get("kind") not in KINDS:
            continue
        if stated.get("format") != FORMAT:
            raise DataError(f"{path}: format {stated.get('format')!r}, expected {FORMAT}; keep the result anew")
        found.append(Kept(stated["kind"], str(stated.get("command", "")), path, document))
    if not found:
        raise DataError(
            f"{folder}: no results there; keep some first, for example: deepen score MODEL --data FILE --keep {folder}"
        )
    return sorted(found, key=lambda kept: KINDS.index(kept.kind))


def floats(values: Sequence[Any]) -> list[float]:
    """Numbers as a document holds them: null is NaN."""
    return [math.nan if value is None else float(value) for value in values]
