"""What a run says of where it was made: the source, the versions and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from deepen import __version__, errors

PACKAGES = ("deepen", "torch", "numpy", "safetensors")


@cache
def source() -> dict[str, Any]:
    """The commit that deepen runs from, and whether its tree has changes that are in no commit.

    An installed package has no tree: the commit is None.
    """
    folder = Path(errors.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or tracked is None:
        return {"commit": None, "uncommitted": False}
    return {"commit": commit, "uncommitted": bool(_git(folder, "status", "--porcelain", "--", "."))}


def versions() -> dict[str, str]:
    """Of Python and of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = __version__ if name == "deepen" else "unknown"
    return found


def machine() -> dict[str, Any]:
    """What the figures of a run depend on; no names of machines or people."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None when there is no git or no repository."""
    try:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
