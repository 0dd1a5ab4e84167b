"""Feed-forwards of SmolLM2-135M split into experts, a quarter of them active, against the whole ones.

Both run the feed-forwards of the same layers one after another on what these layers read in Hamlet, so that a batch of
one token reads its weights from memory as generation does. By default 12 experts of 128 neurons and an mlp router, on
one thread and in processor time. The goal is half of the time, at 1 to 512 tokens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import deepen
from benchmarks.harness import alternate, arguments, ratio, record, timed
from benchmarks.identity_speed import CLOCKS
from deepen.cli.packaged import packaged_model, packaged_text

BATCHES = (1, 4, 16, 64, 256, 512)


def passes(parts: Sequence[nn.Module], reads: Sequence[torch.Tensor], repeats: int) -> Callable[[], None]:
    """Each feed-forward on its tokens, `repeats` times in turn."""

    def run() -> None:
        with torch.inference_mode():
            for _ in range(repeats):
                for part, read in zip(parts, reads, strict=True):
                    part(read)

    return run


def main() -> None:
    parser = arguments(__doc__, rounds=12)
    parser.add_argument("--experts", type=int, default=12, help="experts of a feed-forward (default 12)")
    parser.add_argument("--active", type=int, default=3, help="how many of them a token runs (default 3)")
    parser.add_argument("--layers", type=int, default=8, help="layers that are run (default 8)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ck = deepen.open(packaged_model())
    layers = list(range(10, 10 + options.layers))
    data = deepen.feed_inputs(ck, packaged_text(), tokens=1024)
    split, _ = deepen.moefy(ck, experts=options.experts, active=options.active, data=data, layers=layers)
    models: list[Any] = [each.load(dtype=torch.float32) for each in (ck, split)]
    whole, experts = ([model.model.layers[layer].layer.mlp for layer in layers] for model in models)
    results: dict[str, Any] = {
        "experts": options.experts, "active": options.active, "layers": layers, "threads": torch.get_num_threads(),
        "clock": options.clock,
    }  # fmt: skip
    clock = CLOCKS[options.clock]
    for batch in BATCHES:
        reads = [data.reads[layer][:batch] for layer in layers]
        repeats = max(1, 64 // batch)
        contestants = {
            name: timed(passes(parts, reads, repeats), clock) for name, parts in (("whole", whole), ("split", experts))
        }
        for warm in contestants.values():
            warm()
        print(f"{batch} tokens, {options.rounds} rounds", file=sys.stderr)
        measured = alternate(contestants, options.rounds)
        for name, values in measured.items():
            results[f"{name}_{batch}_us"] = statistics.median(values) / repeats / len(layers) * 1e6
        results[f"split_to_whole_{batch}"] = ratio(measured["split"], measured["whole"])
    for name, value in results.items():
        print(f"{name:20} {value}")
    record("moefy_speed", results, options.json)


if __name__ == "__main__":
    main()
