"""Reading what `--data` names."""

from __future__ import annotations

from pathlib import Path

from deepen.errors import DataError


def read_text(path: str) -> str:
    """The UTF-8 text of a file; a byte order mark at its start is left out.

    Raises:
        DataError: missing, unreadable, empty or not UTF-8.
    """
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"--data {path}: cannot be read: {reason}; give a UTF-8 text file") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = raw[error.start]
        raise DataError(
            f"--data {path}: expected UTF-8 text, got the byte 0x{bad:02x} at offset {error.start}; convert it first, "
            f"for example: iconv -f latin1 -t utf-8 {path}"
        ) from error
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise DataError(f"--data {path}: the file holds no text; give one with at least a window of tokens")
    return text
