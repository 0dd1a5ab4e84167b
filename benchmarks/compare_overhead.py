"""What a run of `deepen compare` costs beside its training: seconds of a suite, less those in the training loop.

Runs of a few steps, one worker. A suite of one run pays for a worker's imports alone; each further run pays for a fork,
reading its data, looking at the held-out parts and writing its line, which is what longer suites pay a run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, record
from deepen.compare.compare import compare
from deepen.compare.suite import Suite

SUITE: dict[str, Any] = {
    "recipe": {
        "stack": {"layers": 2, "width": 32, "heads": 2},
        "task": {"name": "text", "source": "shakespeare", "context": 64, "held_out_bytes": 2048},
        "train": {"steps": 5, "batch": 4, "evaluate": 0},
    },
    "baseline": "plain",
    "variants": {"plain": {}},
}


def beside(runs: int) -> float:
    """Seconds of a suite of so many runs that were not in a training loop."""
    suite = Suite.model_validate({**SUITE, "seeds": list(range(runs))})
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        compare(suite, "suite", Path(place) / "out")
        seconds = time.perf_counter() - started
        lines = (Path(place) / "out" / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    return seconds - sum(json.loads(line)["seconds"] for line in lines)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--runs", type=int, default=9, help="of the longer suite (default 9)")
    options = parser.parse_args()
    # the packaged text is found and read for the first time
    beside(1)
    one, more = [], []
    for _ in range(options.rounds):
        one.append(beside(1))
        more.append(beside(options.runs))
    further = [(b - a) / (options.runs - 1) for a, b in zip(one, more, strict=True)]
    print(f"a suite of one run: {statistics.median(one):.2f} s beside training")
    print(f"each further run:   {statistics.median(further):.2f} s ({min(further):.2f} to {max(further):.2f})")
    record("compare_overhead", {"runs": options.runs, "one": one, "further": further}, options.json)


if __name__ == "__main__":
    main()
