"""What each wiring costs over Pre-LN: seconds and memory of a training step of the same layers.

Small by default: 6 layers of width 128, 4 x 64 tokens. Every wiring has its first options and takes turns with Pre-LN.
On a processor the time is that of the processor, on one thread, and the memory is how much the resident size of a
process of its own grows from before the model is made to the peak of one step; on a GPU it is wall clock, and the peak
that torch allocated. `--compile` compares compiled steps.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import Ratio, alternate, arguments, peak_bytes, ratio, record, timed
from deepen.errors import ProgramError
from deepen.registry import methods
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack

VOCABULARY, REFERENCE = 256, "pre-ln"


@dataclass(frozen=True)
class Row:
    """What a wiring costs: time and memory as ratios to Pre-LN, parameters as a difference."""

    time: Ratio
    memory: float
    parameters: int


def training_step(name: str, options: Any) -> tuple[Callable[[], None], int]:
    """Forward, cross-entropy, backward and AdamW of a stack with this wiring; and its parameters."""
    torch.manual_seed(0)
    config = StackConfig(
        layers=options.layers, width=options.width, heads=4, vocabulary=VOCABULARY, context=options.tokens,
        program=options.program, wiring=name,
    )  # fmt: skip
    stack = Stack(config).to(options.device).train()
    ids = torch.randint(0, VOCABULARY, (options.batch, options.tokens), device=options.device)
    optimiser = torch.optim.AdamW(stack.parameters(), lr=1e-4, fused=True)

    def loss() -> torch.Tensor:
        return F.cross_entropy(stack(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    value = torch.compile(loss) if options.compile else loss

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        value().backward()
        optimiser.step()
        if options.device == "cuda":
            torch.cuda.synchronize()

    return step, sum(parameter.numel() for parameter in stack.parameters())


def memory(name: str, options: Any) -> int:
    """Bytes of model, optimiser and one step, in this process."""
    if options.device == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step, _ = training_step(name, options)
        step()
        step()
        return torch.cuda.max_memory_allocated() - before
    before = peak_bytes()
    step, _ = training_step(name, options)
    step()
    step()
    return peak_bytes() - before


def memory_elsewhere(name: str, options: Any) -> int:
    """The same in a process of its own, whose peak is that of this wiring alone."""
    words = [f"--{key}={getattr(options, key)}" for key in ("layers", "width", "batch", "tokens")]
    words += [f"--program={options.program}"] if options.program else []
    words += ["--compile"] if options.compile else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wiring_overhead", "--memory-of", name, *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    for option, value in (("layers", 6), ("width", 128), ("batch", 4), ("tokens", 64)):
        parser.add_argument(f"--{option}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--program", help="default: every layer once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile the step")
    parser.add_argument("--only", nargs="+", metavar="WIRING", help="these wirings only")
    parser.add_argument("--memory-of", metavar="WIRING", help="print the bytes of one step of this wiring, and stop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(memory(options.memory_of, options))
        return
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    measure = memory if options.device == "cuda" else memory_elsewhere
    names = options.only or [found.name for found in methods("wiring")]
    reference_bytes, rows = measure(REFERENCE, options), {}
    for name in (each for each in names if each != REFERENCE):
        steps, sizes = {}, {}
        try:
            for each in (REFERENCE, name):
                step, sizes[each] = training_step(each, options)
                step()
                steps[each] = timed(step, clock)
        except ProgramError as error:
            print(f"{name}: left out: {error.reason}", file=sys.stderr)
            continue
        print(name, file=sys.stderr)
        measured = alternate(steps, options.rounds)
        rows[name] = Row(
            time=ratio(measured[name], measured[REFERENCE]),
            memory=measure(name, options) / reference_bytes,
            parameters=sizes[name] - sizes[REFERENCE],
        )
        torch.compiler.reset()
    print(f"{'wiring':30} {'time':>6} {'interval':>16} {'memory':>7} {'parameters':>11}")
    for name, row in rows.items():
        interval = f"{row.time.low:.2f} to {row.time.high:.2f}"
        print(f"{name:30} {row.time.median:6.2f} {interval:>16} {row.memory:7.2f} {row.parameters:+11d}")
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "memory_of", "only")}
    table = {name: asdict(row) for name, row in rows.items()}
    record("wiring_overhead", {**settings, "pre_ln_bytes": reference_bytes, "over_pre_ln": table}, options.json)


if __name__ == "__main__":
    main()
