"""Files of keys and values, as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deepen.errors import UsageError


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        UsageError: it cannot be read, or holds something else; names the file.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected keys and values, got {type(data).__name__}")
    return data
