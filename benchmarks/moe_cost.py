"""What mixtures of experts and PEER cost, against dense feed-forwards of as many active parameters.

Two questions, each with a ratio of seconds (1 is ideal):

- `over active`: the feed-forward against a dense SwiGLU (PEER: a GELU) whose parameters are as many as act on one token
  of it. A cost that follows active parameters stays near 1 whatever the total.
- `over fewer`: the feed-forward against itself with the fewest experts of the table, at the same active parameters.

The contestants take turns on the same random input, on one thread unless `--threads` says otherwise; a pass is
forward, or forward and backward with `--train`. On a GPU it is wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness import Ratio, alternate, arguments, ratio, record, timed
from deepen.registry import lookup
from deepen.sublayers.contract import Context, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes


@dataclass(frozen=True)
class Row:
    """One feed-forward: its parameters, and its seconds over those of the two references."""

    total: int
    active: int
    over_active: Ratio
    over_fewer: Ratio


def made(name: str, width: int, hidden: int, options: Any, **choices: Any) -> FeedForward:
    """A feed-forward with random parameters."""
    torch.manual_seed(0)
    kind: Any = lookup(name).implementation
    feed_forward: FeedForward = kind(Sizes(width=width, hidden=hidden), **choices)
    for parameter in feed_forward.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return feed_forward.to(options.device, getattr(torch, options.dtype))


def contestants(options: Any) -> dict[str, tuple[FeedForward, str, str]]:
    """By name: the feed-forward, its dense reference and the one of the fewest experts."""
    width, hidden = options.width, options.hidden or options.width
    found: dict[str, tuple[FeedForward, str, str]] = {}
    for family, counts, dense, matrices in (
        ("moe", options.experts, "swiglu", 3),
        ("peer", options.neurons, "gelu", 2),
    ):
        for count in counts:
            name = f"{family} {count}"
            own = options.heads * 16 if family == "peer" else hidden
            choices = {"heads": options.heads} if family == "peer" else {"top": options.top}
            module = made(family, width, own, options, experts=count, **choices)
            twin = f"{dense} like {name}"
            found[name] = (module, twin, f"{family} {counts[0]}")
            found[twin] = (made(dense, width, round(module.active() / (matrices * width)), options), twin, twin)
    return found


def passing(module: FeedForward, x: torch.Tensor, options: Any) -> Callable[[], None]:
    """One pass over the input."""
    nowhere: Any = None
    context = Context(nowhere, None, nowhere, None, {}, None)

    def once() -> None:
        if options.train:
            module.zero_grad(set_to_none=True)
            module(Read(x), context).y.sum().backward()
        else:
            with torch.no_grad():
                module(Read(x), context)
        if options.device == "cuda":
            torch.cuda.synchronize()

    return once


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    for option, value in (("width", 256), ("tokens", 2048), ("top", 2), ("heads", 8), ("threads", 1)):
        parser.add_argument(f"--{option}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--hidden", type=int, help="of each expert; default: the width")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 16, 64], help="of the mixtures")
    parser.add_argument("--neurons", type=int, nargs="+", default=[1024, 4096, 16384], help="of PEER, squares")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(1, options.tokens, options.width, generator=torch.Generator().manual_seed(1))
    x = x.to(options.device, getattr(torch, options.dtype))
    clock = time.perf_counter if options.device == "cuda" or options.threads > 1 else time.process_time
    found = contestants(options)
    passes = {name: passing(module.train(options.train), x, options) for name, (module, _, _) in found.items()}
    for once in passes.values():
        once()
    measured = alternate({name: timed(once, clock) for name, once in passes.items()}, options.rounds)
    rows = {}
    for name, (module, twin, fewest) in found.items():
        if name != twin:
            total = sum(parameter.numel() for parameter in module.parameters())
            over = [ratio(measured[name], measured[reference]) for reference in (twin, fewest)]
            rows[name] = Row(total, module.active(), *over)
    print(f"{'feed-forward':16} {'total':>10} {'active':>9} {'over active':>24} {'over fewer':>24}")
    for name, row in rows.items():
        cells = [f"{each.median:.2f} ({each.low:.2f} to {each.high:.2f})" for each in (row.over_active, row.over_fewer)]
        print(f"{name:16} {row.total:10d} {row.active:9d} {cells[0]:>24} {cells[1]:>24}")
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    record("moe_cost", {**settings, "rows": {name: asdict(row) for name, row in rows.items()}}, options.json)


if __name__ == "__main__":
    main()
