"""Hard inference of the fast feed-forward against a dense feed-forward of the same training width.

One layer of width 768 with leaves of 32, on one thread, in processor time. For each training width and batch the two
take turns; the way that the layer chose stands beside the ratio. The crossover of a training width is the smallest
batch from which on the fast feed-forward is no slower, of those that were measured. Tokens go to leaves as random
weights send them; leaves that are used unevenly make groups larger and the layer faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Ratio, alternate, arguments, ratio, record, timed
from deepen.sublayers.contract import Context, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.ffn.fast_feed_forward import FastFeedForward
from deepen.sublayers.ffn.relu import ReLU

# Small passes are repeated until they take about so many seconds together, so that the clock is fine enough.
ENOUGH = 0.02


@dataclass(frozen=True)
class Row:
    """A training width and a batch: milliseconds of a dense pass, how many times faster a hard one is, and its way."""

    hidden: int
    batch: int
    way: str
    dense: float
    faster: Ratio


def fill(module: FeedForward) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    module.eval()


def passes(module: FeedForward, x: torch.Tensor) -> Callable[[], object]:
    nowhere: Any = None
    read, context = Read(x), Context(nowhere, None, nowhere, None, {}, None)
    module(read, context)
    started = time.process_time()
    module(read, context)
    times = max(1, int(ENOUGH / max(1e-6, time.process_time() - started)))
    return timed(lambda: [module(read, context) for _ in range(times)], lambda: time.process_time() / times)


@torch.inference_mode()
def rows(options: Any) -> list[Row]:
    found: list[Row] = []
    for hidden in options.hidden:
        depth = (hidden // options.leaf).bit_length() - 1
        fast = FastFeedForward(Sizes(width=options.width, hidden=options.leaf), depth=depth)
        dense = ReLU(Sizes(width=options.width, hidden=options.leaf * 2**depth))
        for module in (fast, dense):
            fill(module)
        for batch in options.batches:
            x = torch.randn(1, batch, options.width)
            contestants: Any = {"dense": passes(dense, x), "fast": passes(fast, x)}
            measured = alternate(contestants, options.rounds)
            middle = 1000 * sorted(measured["dense"])[options.rounds // 2]
            found.append(Row(hidden, batch, fast.way(batch), middle, ratio(measured["dense"], measured["fast"])))
    return found


def crossovers(table: list[Row]) -> dict[int, int | None]:
    """For each training width the smallest batch from which on no batch is slower; None where the last one is."""
    found: dict[int, int | None] = {}
    for row in reversed(table):
        if row.hidden not in found:
            found[row.hidden] = row.batch if row.faster.median >= 1 else None
        elif row.faster.median >= 1 and found[row.hidden] == _next(table, row):
            found[row.hidden] = row.batch
    return found


def _next(table: list[Row], row: Row) -> int | None:
    return next((each.batch for each in table if each.hidden == row.hidden and each.batch > row.batch), None)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--width", type=int, default=768, help="of the stream (default 768)")
    parser.add_argument("--leaf", type=int, default=32, help="hidden width of a leaf (default 32)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384, 65536], metavar="WIDTH")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096], metavar="TOKENS")
    options = parser.parse_args()
    options.hidden, options.batches = sorted(options.hidden), sorted(options.batches)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = rows(options)
    print(f"{'width':>6} {'batch':>6} {'way':9} {'dense ms':>9} {'faster':>7} {'interval':>16}")
    for row in table:
        interval = f"{row.faster.low:.2f} to {row.faster.high:.2f}"
        print(f"{row.hidden:6} {row.batch:6} {row.way:9} {row.dense:9.2f} {row.faster.median:7.2f} {interval:>16}")
    met = crossovers(table)
    for hidden, batch in met.items():
        print(
            f"width {hidden}: no slower from batch {batch}" if batch else f"width {hidden}: slower at the largest batch"
        )
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    record("fff_speed", {**settings, "rows": [asdict(row) for row in table], "crossovers": met}, options.json)


if __name__ == "__main__":
    main()
