"""Loop counts drawn in training: `(2-5)*1..8[draw=poisson:4]`.

One draw a forward pass, of torch's generator, cut to the range of the loop.

`lognormal:m:s` is Poisson with a log-normal rate of mean m, as in Geiping et al., arXiv:2502.05171.
"""

from __future__ import annotations

import math

import torch

from deepen.program import Loop, Node, Plan
from deepen.program.tree import value_of, walk


def drawn_counts(plan: Plan) -> dict[int, int]:
    """A count for each run-time loop of a plan that says how to draw it; the others run their maximum."""
    return {node.number: count(rule, node.low, node.high) for node, rule in _rules(plan.root)}


def _rules(root: Node) -> list[tuple[Loop, tuple[object, ...]]]:
    loops = [node for node in walk(root) if isinstance(node, Loop) and node.low != node.high]
    rules = [(node, value_of(node.attrs, "draw")) for node in loops]
    return [(node, rule) for node, rule in rules if isinstance(rule, tuple) and rule[0] != "max"]


def count(rule: tuple[object, ...], low: int, high: int) -> int:
    """One draw of a rule such as `("poisson", 4)`, cut to low..high."""
    kind, *numbers = rule
    mean, *rest = (float(number) for number in numbers) if numbers else (0.0,)  # pyright: ignore[reportArgumentType]
    if kind == "uniform":
        return int(torch.randint(low, high + 1, ()).item())
    if kind == "poisson":
        return _cut(torch.poisson(torch.tensor(mean)).item(), low, high)
    (sigma,) = rest
    rate = math.exp(math.log(mean) - sigma**2 / 2 + sigma * torch.randn(()).item())
    return _cut(torch.poisson(torch.tensor(rate)).item() + 1, low, high)


def _cut(drawn: float, low: int, high: int) -> int:
    return max(low, min(high, int(drawn)))
