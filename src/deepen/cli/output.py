"""What commands print: one JSON document, or plain aligned text that any terminal, pipe or file can take."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.cli.options import Keeping


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout; numbers that JSON lacks (infinity, NaN) become null."""
    print(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))


# The words that `deepen` was called with, for documents that say how they were made.
called: ContextVar[Sequence[str]] = ContextVar("called", default=())


def give(common: Keeping, kind: str, document: Mapping[str, Any]) -> bool:
    """Keeps a result where `--keep` says, and prints it where `--json` says.

    Returns:
        Whether it was printed, so that nothing else may be.

    Raises:
        SaveError: the folder cannot be written.
    """
    if common.keep:
        from deepen.report.kept import keep

        path = keep(Path(common.keep), kind, shlex.join(["deepen", *called.get()]), plain(document))
        note(f"kept in {path}")
    if common.json:
        print_json(document)
    return common.json


def plain(value: Any) -> Any:
    """A value as JSON holds it; infinity and NaN become None.

    Raises:
        TypeError: something that JSON has no place for.
    """
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case str() | int() | None:
            return value
        case Fraction():
            return float(value)
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Sequence():
            return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")


def note(text: str) -> None:
    """One line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as aligned columns; the first row is the heading and the first `left` columns are aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in rows)


def amount(value: float) -> str:
    """A count in four figures: 134.5 M."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g}"


def size(count: float) -> str:
    """Bytes in powers of ten: 47.2 MB."""
    return f"{amount(count)}B" if count >= 1000 else f"{count:.0f} B"


def ratio(value: float, reference: float) -> str:
    """How many times the reference: x1.27."""
    return f"x{float(value / reference):.4g}" if reference else "-"


def program_text(checkpoint: Checkpoint) -> str:
    """The program in its normal form, without the name of the tower where there is only one."""
    text = str(checkpoint.program)
    return text if len(checkpoint.depth) > 1 else text.removeprefix(f"{next(iter(checkpoint.depth))}: ")


def runs(layers: Sequence[int]) -> str:
    """Layer numbers with ascending runs written as `3-7`."""
    pieces: list[list[int]] = []
    for layer in layers:
        if pieces and pieces[-1][1] + 1 == layer:
            pieces[-1][1] = layer
        else:
            pieces.append([layer, layer])
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in pieces)
