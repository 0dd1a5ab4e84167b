"""Dropping three layers of a 2 GB checkpoint: deepen against `cp` of the bytes kept and mergekit's passthrough.

Every run is a process of its own and writes a folder that is removed before the next run, after the disk has taken
what was still in memory. The source stays in the page cache for all alike; none of them syncs tensor data. Recorded
for the Python programs are `process`, from start to exit, and `work`, which leaves out the start of the interpreter
and the imports at the top of the program; `cpu` is processor time, which other load on the machine moves least.
Memory is the peak of the process; the interpreter beside it imports the same modules and does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import PEER_PYTHON, alternate, arguments, ratio, record
from benchmarks.llama_folder import write_llama

LAYERS, DROPPED = 20, (8, 9, 10)
PROGRAM = "0-7 11-19"
SHARD_BYTES = 500 * 10**6

# Each prints one line of JSON: seconds of imports, seconds and processor seconds of work, peak bytes, modules.
REPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.harness import peak_bytes
times = {"imports": t1 - t0, "work": t2 - t1, "cpu": c2 - c1}
print(json.dumps({**times, "peak": peak_bytes(), "modules": sorted(sys.modules)}))
"""
DEEPEN = f"""
import sys, time
t0 = time.perf_counter()
import deepen, deepen.checkpoint.open, deepen.checkpoint.save
t1, c1 = time.perf_counter(), time.process_time()
deepen.open(sys.argv[2]).apply(sys.argv[4]).save(sys.argv[3], max_shard_bytes={SHARD_BYTES})
t2, c2 = time.perf_counter(), time.process_time()
{REPORT}"""
MERGEKIT = f"""
import sys, time
t0 = time.perf_counter()
from mergekit.scripts.run_yaml import main
t1, c1 = time.perf_counter(), time.process_time()
options = ["--no-copy-tokenizer", "--quiet", "--out-shard-size", "{SHARD_BYTES}"]
main([sys.argv[4], sys.argv[3], *options], standalone_mode=False)
t2, c2 = time.perf_counter(), time.process_time()
{REPORT}"""
ONLY_IMPORTS = """
import contextlib, importlib, json, sys
for name in json.load(open(sys.argv[2])):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
sys.path.insert(0, sys.argv[1])
from benchmarks.harness import peak_bytes
print(json.dumps({"peak": peak_bytes()}))
"""


class Race:
    """The folders, the contestants, and what each of their runs reported."""

    def __init__(self, root: Path) -> None:
        self.root, self.source, self.out = root, root / "source", root / "out"
        self.kept = root / "kept"
        self.reports: dict[str, list[dict[str, Any]]] = {"cp": [], "deepen": [], "mergekit": []}

    def clear(self) -> None:
        """Removes the last output and waits for the disk, so that no run pays for the one before."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()

    def python(self, name: str, python: str, code: str, argument: str) -> Callable[[], float]:
        """A contestant that runs `code` and keeps its report."""
        command = [python, "-c", code, str(Path(__file__).parents[1]), str(self.source), str(self.out), argument]

        def run() -> float:
            start = time.perf_counter()
            self.reports[name].append(json.loads(_last_line(command)))
            return time.perf_counter() - start

        return run

    def copy(self) -> float:
        """`cp` of the folder that deepen writes: the same files, the same bytes."""
        start, before = time.perf_counter(), os.times()
        subprocess.run(["cp", "-r", str(self.kept), str(self.out)], check=True)
        wall, after = time.perf_counter() - start, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        self.reports["cp"].append({"work": wall, "cpu": cpu})
        return wall

    def imports_peak(self) -> int:
        """Peak memory of an interpreter that imports what the last deepen run had imported."""
        listed = self.root / "modules.json"
        modules = [
            name for name in self.reports["deepen"][-1]["modules"] if not name.startswith(("__main__", "benchmarks"))
        ]
        listed.write_text(json.dumps(modules), encoding="utf-8")
        command = [sys.executable, "-c", ONLY_IMPORTS, str(Path(__file__).parents[1]), str(listed)]
        return json.loads(_last_line(command))["peak"]


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--folder", type=Path, help="where to make the 2 GB of files (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deepen-bench-", dir=options.folder) as folder:
        race = Race(Path(folder))
        total = write_llama(race.source, LAYERS, SHARD_BYTES)
        deepen = race.python("deepen", sys.executable, DEEPEN, PROGRAM)
        # The first run of each fills the caches and is not counted.
        deepen()
        race.out.rename(race.kept)
        kept = sum(path.stat().st_size for path in race.kept.iterdir())
        contestants = {"cp": race.copy, "deepen": deepen}
        if PEER_PYTHON.exists():
            recipe = race.root / "slices.yaml"
            recipe.write_text(_slices(race.source), encoding="utf-8")
            contestants["mergekit"] = race.python("mergekit", str(PEER_PYTHON), MERGEKIT, str(recipe))
            race.clear()
            contestants["mergekit"]()
            _same_weights(race.kept, race.out)
        else:
            print("mergekit is not installed in benchmarks/.venv-peer: left out", file=sys.stderr)
        for reports in race.reports.values():
            reports.clear()
        print(f"source {total / 1e9:.2f} GB, written {kept / 1e9:.2f} GB, {options.rounds} rounds", file=sys.stderr)
        process = alternate(contestants, options.rounds, race.clear)
        results = _results(race, process)
        results |= {"source_bytes": total, "written_bytes": kept}
    for name, value in results.items():
        print(f"{name:34} {value}")
    record("apply_speed", results, options.json)


def _results(race: Race, process: dict[str, list[float]]) -> dict[str, Any]:
    results: dict[str, Any] = {f"{name}_process_s": statistics.median(values) for name, values in process.items()}
    runs = {name: reports for name, reports in race.reports.items() if reports}
    measured = {
        name: {key: [report[key] for report in reports] for key in ("work", "cpu")} for name, reports in runs.items()
    }
    for name, reports in runs.items():
        results |= {f"{name}_{key}_s": statistics.median(values) for key, values in measured[name].items()}
        if name != "cp":
            results[f"{name}_imports_s"] = statistics.median(report["imports"] for report in reports)
            results[f"{name}_peak_mb"] = max(report["peak"] for report in reports) / 1e6
    results["interpreter_with_imports_mb"] = race.imports_peak() / 1e6
    results["deepen_above_imports_mb"] = results["deepen_peak_mb"] - results["interpreter_with_imports_mb"]
    for peer in ("cp", "mergekit"):
        if peer in runs:
            results[f"deepen_process_to_{peer}"] = ratio(process["deepen"], process[peer])
            for key in ("work", "cpu"):
                results[f"deepen_{key}_to_{peer}"] = ratio(measured["deepen"][key], measured[peer][key])
    return results


def _last_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a contestant failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def _slices(source: Path) -> str:
    ranges = [(0, DROPPED[0]), (DROPPED[-1] + 1, LAYERS)]
    lines = [f"  - sources: [{{model: {source}, layer_range: [{a}, {b}]}}]" for a, b in ranges]
    return "\n".join(["merge_method: passthrough", "dtype: bfloat16", "slices:", *lines]) + "\n"


def _same_weights(ours: Path, theirs: Path) -> None:
    """Both tools must have done the same work before their times are compared."""
    import torch
    from safetensors import safe_open

    def places(folder: Path) -> dict[str, Any]:
        files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118

    left, right = places(ours), places(theirs)
    if left.keys() != right.keys():
        raise SystemExit(f"deepen and mergekit wrote different tensors: {sorted(left.keys() ^ right.keys())[:4]}")
    for name in left:
        a, b = (files[name].get_tensor(name).view(torch.int16) for files in (left, right))
        if not torch.equal(a, b):
            raise SystemExit(f"deepen and mergekit wrote different values for {name}")


if __name__ == "__main__":
    main()
