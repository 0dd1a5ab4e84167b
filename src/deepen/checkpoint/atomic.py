"""Folders and files that appear whole or not at all.

Both are written under a hidden name beside the target and renamed at the end, so a process that is killed leaves the
old state and a `.<name>.partial-*` that `leftovers` finds. Nothing is flushed to the disk: after a crash of the
machine (not of the process) a new file may be short, which the size check of `open_safetensors` reports; waiting for
gigabytes to reach the disk would cost every save far more than it protects, since the input still exists.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, overload

from deepen.errors import SaveError

_MARK = ".partial-"
# What the device, not the caller's code, can answer to a write.
_DEVICE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS)


@contextmanager
def atomic_folder(target: Path, *, forbidden: Sequence[Path] = ()) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the block ends, and vanishes when it raises.

    The yielded path is absolute and on the same file system. Only an empty folder that another process makes at
    `target` in the last instant before the rename can be replaced; anything else there is kept and reported.

    Args:
        target: a path at which nothing exists yet.
        forbidden: the input; the target may neither be, lie inside, nor contain any of these.

    Raises:
        SaveError: the target exists, is forbidden, or cannot be made where it is.
    """
    target = _place(target)
    real = target.resolve()
    for path in forbidden:
        other = path.resolve()
        if real == other or real.is_relative_to(other) or other.is_relative_to(real):
            relation = "is" if real == other else "lies inside" if real.is_relative_to(other) else "contains"
            raise SaveError(f"{target} {relation} the input {other}, which must stay as it is; save to another folder")
    _refuse_existing(target)
    partial = _sibling(target)
    try:
        partial.mkdir()
    except OSError as error:
        raise SaveError(f"cannot make {partial}: {error.strerror}; save somewhere else") from error
    try:
        yield partial
        _refuse_existing(target)
        try:
            os.rename(partial, target)
        except OSError as error:
            raise SaveError(f"cannot rename {partial} to {target}: {error.strerror}; save somewhere else") from error
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if partial.exists():
            error.add_note(f"{partial} could not be removed; remove it by hand")
        raise


@overload
def atomic_file(path: Path, mode: Literal["w"] = "w") -> contextlib.AbstractContextManager[IO[str]]: ...
@overload
def atomic_file(path: Path, mode: Literal["wb"]) -> contextlib.AbstractContextManager[IO[bytes]]: ...
def atomic_file(path: Path, mode: Literal["w", "wb"] = "w") -> contextlib.AbstractContextManager[IO[Any]]:
    """Opens a file that replaces `path` when the block ends; if it raises, an old file stays as it was.

    Args:
        path: the file to write; a link is followed.
        mode: "w" for UTF-8 text with the same line ends on every system, "wb" for bytes.

    Raises:
        SaveError: the file cannot be made or written.
    """
    return _atomic_file(path, mode)


@contextmanager
def _atomic_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    target = _place(path.resolve() if path.is_symlink() else path)
    if target.is_dir():
        raise SaveError(f"cannot write {target}: it is a folder; give the name of a file")
    partial = _sibling(target)
    try:
        with open(partial, "xb") if mode == "wb" else open(partial, "x", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and (error.errno in _DEVICE_ERRORS or error.filename == str(partial)):
            raise SaveError(f"cannot write {target}: {error.strerror}; make room, or write it elsewhere") from error
        raise


def leftovers(target: Path) -> list[Path]:
    """What killed writers of `target` left beside it, sorted; nothing is removed.

    A writer that is still running is listed too: the number after `.partial-` is its process id.
    """
    parent = target.parent
    prefix = f".{target.name}{_MARK}"
    try:
        return sorted(path for path in parent.iterdir() if path.name.startswith(prefix))
    except OSError:
        return []


def _place(target: Path) -> Path:
    """The target with its parent resolved, which must be a folder that can be written."""
    parent = target.parent
    try:
        if not parent.is_dir():
            got = "it is not a folder" if os.path.lexists(parent) else "it does not exist"
            raise SaveError(f"cannot write {target}: expected {parent} to be a folder, but {got}; make it first")
    except OSError as error:
        raise SaveError(f"cannot write {target}: {error.strerror}; give another path") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SaveError(f"cannot write {target}: no permission to write in {parent}; permit it or save elsewhere")
    # Absolute, so that a change of the working directory inside the block changes nothing.
    return parent.resolve() / target.name if target.name else target.resolve()


def _refuse_existing(target: Path) -> None:
    # lexists: a dangling link exists too, and renaming would replace it.
    if os.path.lexists(target):
        kind = "a link" if target.is_symlink() else "a folder" if target.is_dir() else "a file"
        raise SaveError(f"{target} exists already ({kind}) and is left as it is; choose a new name or remove it first")


def _sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}")
