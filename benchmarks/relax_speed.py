"""Relaxed recursion of SmolLM2-135M: 30 layers become 15 in a loop of two turns with adapters, written from disk.

deepen converts a folder into a folder, tensor by tensor. The peer is a plain loop over a loaded model, which does
the same averages and takes `torch.linalg.svd` of the same differences and keeps as much of them, and writes nothing.
Both run in processes of their own, on fp32 weights. Memory is the peak of the process less that of an interpreter with
the same imports: the goal is under two layers above the model's own size, which the peer holds and deepen does not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import alternate, arguments, ratio, record
from deepen.cli.packaged import packaged_model

RANK, TIMES, LAYERS = 64, 2, 30

START = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from benchmarks.harness import peak_bytes
import torch, deepen, deepen.checkpoint.open, deepen.checkpoint.save, deepen.checkpoint.skeleton, deepen.surgery.relax
from safetensors import safe_open
deepen.open(sys.argv[2]).skeleton.model
base, start = peak_bytes(), time.perf_counter()
"""
END = """
print(json.dumps({"work": time.perf_counter() - start, "above": peak_bytes() - base}))
"""
DEEPEN = f"""{START}
relaxed, _ = deepen.relax(deepen.open(sys.argv[2]), {TIMES}, rank={RANK})
relaxed.save(sys.argv[3])
{END}"""
PEER = f"""{START}
with safe_open(sys.argv[2] + "/model.safetensors", "pt") as file:
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
names = [name.split(".0.", 1)[1] for name in weights if ".layers.0." in name]
size, kept = {LAYERS} // {TIMES}, []
for place in range(size):
    for name in names:
        group = [weights[f"model.layers.{{place + turn * size}}.{{name}}"] for turn in range({TIMES})]
        tied = sum(group) / {TIMES}
        for matrix in group if tied.ndim == 2 else ():
            u, s, v = torch.linalg.svd(matrix - tied, full_matrices=False)
            kept.append(((u[:, :{RANK}] * s[:{RANK}]).clone(), v[:{RANK}].clone()))
{END}"""


class Race:
    """The folders and what each run reported."""

    def __init__(self, root: Path) -> None:
        self.root, self.source, self.out = root, root / "source", root / "out"
        self.reports: dict[str, list[dict[str, Any]]] = {"deepen": [], "svd": []}

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def contestant(self, name: str, code: str) -> Callable[[], float]:
        """A process that runs `code` and reports seconds and bytes."""
        command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(self.source), str(self.out)]

        def run() -> float:
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
            self.reports[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
            return time.perf_counter() - start

        return run


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, help="SmolLM2-135M, a .gguf file or a folder (default: the packaged one)")
    options = parser.parse_args()
    import deepen

    with tempfile.TemporaryDirectory(prefix="deepen-bench-") as folder:
        race = Race(Path(folder))
        opened = deepen.open(options.model or packaged_model())
        opened.save(race.source, dtype="F32")
        layer = [info for name, info in opened.source.infos.items() if ".layers.0." in name]
        layer_mb = sum(4 * info.numel for info in layer) / 1e6
        contestants = {"deepen": race.contestant("deepen", DEEPEN), "svd": race.contestant("svd", PEER)}
        alternate(contestants, options.rounds, race.clear)
        work = {name: [report["work"] for report in reports] for name, reports in race.reports.items()}
        results: dict[str, Any] = {f"{name}_s": sorted(values)[len(values) // 2] for name, values in work.items()}
        results |= {
            f"{name}_above_imports_mb": max(report["above"] for report in reports) / 1e6
            for name, reports in race.reports.items()
        }
        results |= {"layer_mb": layer_mb, "deepen_to_svd": ratio(work["deepen"], work["svd"])}
    for name, value in results.items():
        print(f"{name:34} {value}")
    record("relax_speed", results, options.json)


if __name__ == "__main__":
    main()
