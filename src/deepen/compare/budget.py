"""One budget for every variant: sizes are solved so that parameters or executed FLOPs are those of the baseline.

    parameters   stored parameters of the model
    flops        FLOPs of a training step over one token, 3 times those of a forward pass at half the context

The width is taken first: the largest that stays within the budget, heads and the ratio of the feed-forward kept; what
is left goes into the hidden width of the feed-forward. `vary: hidden` moves the hidden width alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack

Unit = Literal["parameters", "flops"]
Vary = Literal["width", "hidden"]
# A backward pass takes twice the products of a forward pass.
TRAINING = 3.0
WIDEST = 65536


@dataclass(frozen=True)
class Size:
    """What a configuration takes: stored parameters, and FLOPs of training on one token."""

    parameters: int
    flops: float

    def of(self, unit: Unit) -> float:
        """The figure of one unit."""
        return self.parameters if unit == "parameters" else self.flops


def size(config: StackConfig, context: int) -> Size:
    """The size of a configuration when it trains on `context` tokens at a time.

    Run-time loops count at their maximum.
    """
    with torch.device("meta"):
        stack = Stack(config, seed=None)
    cost = stack_cost(stack, context // 2 if config.causal else context)
    return Size(sum(parameter.numel() for parameter in stack.parameters()), TRAINING * cost.flops)


def matched(
    config: StackConfig, target: float, *, unit: Unit, context: int, vary: Vary = "width", tolerance: float = 0.01
) -> StackConfig:
    """The configuration of the same design whose size is `target`.

    Args:
        config: the design; its own width and hidden width are where the search starts.
        target: parameters, or FLOPs a token.
        unit: which of the two.
        context: tokens that a training window holds.
        vary: what may change.
        tolerance: how far from the target is allowed, as a share of it.

    Raises:
        UsageError: no size comes so near; names the nearest.
    """

    def taken(candidate: StackConfig) -> float:
        return size(candidate, context).of(unit)

    found = config
    if vary == "width":
        step = config.heads * (2 if config.positions == "rotary" else 1) if config.head_width is None else 2
        width = step * _largest(lambda n: taken(_wide(config, n * step)) <= target, WIDEST // step)
        found = _wide(config, max(width, step))
    hidden = max(1, _largest(lambda n: taken(found.model_copy(update={"hidden": n})) <= target, WIDEST))
    nearest = min(
        (found.model_copy(update={"hidden": n}) for n in (hidden, hidden + 1)), key=lambda c: abs(taken(c) - target)
    )
    reached = taken(nearest)
    if abs(reached - target) > tolerance * target:
        raise UsageError(
            f"no {vary} gives {target:,.0f} {unit}: the nearest is {reached:,.0f} at width {nearest.width}, hidden "
            f"{nearest.hidden}; give the variant fewer layers or a smaller vocabulary, or the budget a larger tolerance"
        )
    return StackConfig.model_validate(nearest.model_dump())


def _wide(config: StackConfig, width: int) -> StackConfig:
    """The design at another width, with the ratio of its feed-forward kept."""
    hidden = None if config.hidden is None else max(1, math.floor(config.hidden * width / config.width))
    return config.model_copy(update={"width": width, "hidden": hidden})


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n from 1 to `most` that fits, of a rule that only fails from some n on; 0 when none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
