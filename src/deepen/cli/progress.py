"""Progress of long work, on stderr: a bar in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

# Between two lines when stderr is a file or a pipe.
SECONDS = 5.0


class Step(Protocol):
    """Called with the units done since the last call, and with all there are where that was not known before."""

    def __call__(self, count: int, total: int | None = None, /) -> None: ...


@contextmanager
def progress(title: str, total: int | None, unit: str) -> Iterator[Step]:
    """Yields the function to call as work gets done.

    Args:
        title: what is being done.
        total: units in all; None when that is not known.
        unit: what is counted, in the plural; `bytes` are shown in MB.
    """
    if sys.stderr.isatty():
        with _bar(title, total, unit) as step:
            yield step
    else:
        yield _Lines(title, total, unit)


@contextmanager
def _bar(title: str, total: int | None, unit: str) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    else:
        counts = (MofNCompleteColumn(), TextColumn(f"{unit} {{task.fields[rate]}}"))
    # markup off: a program may hold square brackets
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total, rate="")
        started = time.perf_counter()
        done = 0

        def step(count: int, total: int | None = total, /) -> None:
            nonlocal done
            done += count
            bars.update(
                task, advance=count, total=total, rate=f"{done / max(time.perf_counter() - started, 1e-9):.3g}/s"
            )

        yield step


class _Lines:
    """Plain lines, at most one every few seconds; work shorter than that prints none."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.started = self.shown = time.perf_counter()
        self.done = 0

    def __call__(self, count: int, total: int | None = None, /) -> None:
        self.done += count
        self.total = total or self.total
        now = time.perf_counter()
        if now - self.shown < SECONDS:
            return
        self.shown = now
        rate = self.done / (now - self.started)
        left = f", {(self.total - self.done) / rate:.0f} s left" if self.total and rate else ""
        of = f"/{self.total}" if self.total else ""
        print(f"{self.title}: {self.done}{of} {self.unit}, {rate:.3g}/s{left}", file=sys.stderr, flush=True)
