"""What every benchmark shares: alternating runs, paired ratios with an interval, and a JSON record.

The contestants of a round run one after another and the order turns from round to round, so that a machine that slows
down or a cache that fills meets all of them. A figure is the median over rounds of the ratio inside a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import comb
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PEER_PYTHON = FOLDER / ".venv-peer" / "bin" / "python"
PACKAGES = ("deepen", "torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class Ratio:
    """A ratio over rounds.

    Attributes:
        median: of the ratios inside a round.
        low: lower end of an interval for the median.
        high: its upper end.
        coverage: how likely such an interval covers the true median, at least.
        rounds: how many ratios there are.
    """

    median: float
    low: float
    high: float
    coverage: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.coverage:.1%} interval, n={self.rounds})"


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Runs every contestant once a round, in an order that turns; each returns its own measurement.

    Args:
        contestants: by name; what they return is recorded.
        rounds: how many rounds count.
        before: called before each run, outside of what is measured.
    """
    names = list(contestants)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            before()
            measured[name].append(contestants[name]())
        line = "  ".join(f"{name} {values[-1]:.3f}" for name, values in measured.items())
        print(f"  round {turn + 1}/{rounds}: {line}", file=sys.stderr, flush=True)
    return measured


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """The action as a contestant: seconds of wall clock, or of processor time with `time.process_time`."""

    def run() -> float:
        start = clock()
        action()
        return clock() - start

    return run


def ratio(measured: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The median of the paired ratios, with a distribution-free interval: two order statistics, at least 95 %.

    With fewer than six rounds no such interval exists; the whole range is given with the coverage it has.
    """
    ratios = sorted(a / b for a, b in zip(measured, reference, strict=True))
    n = len(ratios)
    cut = 0
    while 2 * (cut + 1) < n and _coverage(n, cut + 1) >= 0.95:
        cut += 1
    return Ratio(statistics.median(ratios), ratios[cut], ratios[n - 1 - cut], _coverage(n, cut), n)


def _coverage(n: int, cut: int) -> float:
    """Chance that the median lies between the order statistics `cut` and n - 1 - `cut` (from 0)."""
    return 1 - 2 * sum(comb(n, k) for k in range(cut + 1)) / 2**n


def peak_bytes() -> int:
    """The largest resident size of this process so far.

    `ru_maxrss` also holds the size that the parent had before it started this program, so Linux's own counter of the
    program is preferred.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": memory, "system": platform.platform()}


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds that count (default {rounds})")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    return parser


def record(name: str, results: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """The result with the machine, the versions, the load and the command; written to `path` if there is one."""
    entry = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "load_average": os.getloadavg(),
        "results": {key: asdict(value) if isinstance(value, Ratio) else value for key, value in results.items()},
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
    return entry
