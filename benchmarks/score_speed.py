"""What scoring costs: all scores that watch the stream, together, against one plain pass on SmolLM2-135M.

Both read the same windows on the same loaded model and run alternately. The plain pass is the model's own forward call
with the head and without a cache; the scores need no head, so their pass leaves it out, and the same pass without any
score is measured too. By default on one thread and in processor time, which other load on the machine moves least.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

import deepen
from benchmarks.harness import alternate, arguments, ratio, record, timed
from benchmarks.identity_speed import CLOCKS
from deepen.cli.packaged import packaged_model, packaged_text
from deepen.probe.scores.reading import Reading, open_reading
from deepen.probe.scores.score import TOGETHER, choose, score_reading


def plain(reading: Reading) -> None:
    """One pass of the model as transformers runs it."""
    with torch.inference_mode():
        for ids, _ in reading.groups():
            reading.run(ids, head=True)


def bare(reading: Reading) -> None:
    """The pass that the scores share, without any of them."""
    with torch.inference_mode():
        for ids, _ in reading.groups():
            reading.run(ids)


def main() -> None:
    parser = arguments(__doc__, rounds=10)
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (default 512)")
    parser.add_argument("--windows", type=int, default=2, help="windows of a pass (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reading = open_reading(
        deepen.open(packaged_model()), packaged_text(), tower="", context=options.context,
        tokens=options.windows * options.context, batch=1, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    chosen = choose(TOGETHER)
    results: dict[str, Any] = {
        "scores": list(chosen), "tokens": reading.tokens, "threads": torch.get_num_threads(), "clock": options.clock,
    }  # fmt: skip
    clock = CLOCKS[options.clock]
    contestants = {
        "plain": timed(lambda: plain(reading), clock),
        "scores": timed(lambda: score_reading(reading, chosen), clock),
        "no_head": timed(lambda: bare(reading), clock),
    }
    plain(reading)
    print(f"{reading.tokens} tokens, {options.rounds} rounds", file=sys.stderr)
    measured = alternate(contestants, options.rounds)
    results |= {f"{name}_s": statistics.median(values) for name, values in measured.items()}
    results["scores_to_plain"] = ratio(measured["scores"], measured["plain"])
    results["scores_to_no_head"] = ratio(measured["scores"], measured["no_head"])
    for name, value in results.items():
        print(f"{name:20} {value}")
    record("score_speed", results, options.json)


if __name__ == "__main__":
    main()
