"""Every error that deepen raises on purpose.

An error says where, what was expected, what came and what to do. The command line prints the message alone and
exits with status 1 (2 for a wrong command line); the Python API raises these classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeepenError(Exception):
    """Base class: bad input or an unsupported request, never a bug of ours."""


class ProgramError(DeepenError):
    """A program that does not parse, or does not fit the model it is applied to.

    Attributes:
        column: 1-based column in `text` where the error lies, or None if it concerns the whole program.
        text: the program as written.
        reason: what is wrong, without the position.
    """

    def __init__(self, reason: str, text: str = "", column: int | None = None) -> None:
        self.reason, self.text, self.column = reason, text, column
        super().__init__(self._message())

    def _message(self) -> str:
        if self.column is None:
            return f"program: {self.reason}"
        before = self.text[: self.column - 1]
        line_start = before.rfind("\n") + 1
        line_end = self.text.find("\n", self.column - 1)
        line = self.text[line_start : line_end if line_end >= 0 else len(self.text)]
        caret = " " * (len(before) - line_start) + "^"
        return f"program column {self.column}: {self.reason}\n  {line}\n  {caret}"


class CheckpointError(DeepenError):
    """A checkpoint that cannot be read as it stands: missing, truncated, contradictory or unsafe files."""


class FamilyError(DeepenError):
    """A model family that is unknown, or that cannot express the requested result."""


class SaveError(DeepenError):
    """A save that was refused or failed; the old state is whole."""


class DataError(DeepenError):
    """Text or other data that cannot be used."""


class UsageError(DeepenError):
    """Arguments of a command that do not fit together."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The suffix ` (did you mean 'x'?)` for an unknown name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
