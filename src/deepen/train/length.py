"""How many steps a recipe means: stated, or those that fit a number of tokens, FLOPs or minutes.

    FLOPs of a step     3 (forward FLOPs of a token) (tokens of a step), a backward pass counted as two forward passes

Minutes are turned into steps before the run, by timing a few of them on a copy, so that a run which is resumed has as
many as one that is not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from statistics import median

from deepen.errors import UsageError
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack
from deepen.train.growth import Stage, guideline_steps
from deepen.train.recipe_file import RecipeFile

TIMED = 4


def step_tokens(stack: Stack, rows: int, length: int) -> int:
    """Positions of the stream that a step computes, for rows of so many numbers along their last axis."""
    if stack.config.input == "patches":
        assert stack.config.image is not None
        _, height, width = stack.config.image
        return rows * (height // stack.config.patch) * (width // stack.config.patch)
    return rows * -(-length // (stack.config.patch if stack.config.input == "series" else 1))


def token_flops(stack: Stack, positions: int, times: int = 1) -> float:
    """FLOPs of a token in a forward pass over rows of so many positions, with the layers `times` over."""
    seen = positions // 2 if stack.config.causal else positions
    whole, head = float(stack_cost(stack, max(1, seen)).flops), 2.0 * stack.head.weight.numel()
    return times * (whole - head) + head


def stages_of(recipe: RecipeFile, steps: int, stack: Stack, tokens: int) -> tuple[Stage, ...]:
    """The growths of a run of so many steps.

    Raises:
        UsageError: two at one step, one after the end, or a guideline that asks for more than the run has.
    """
    made: list[Stage] = []
    for place, growing in enumerate(recipe.grow):
        if growing.at == "guideline":
            if place:
                raise UsageError("grow.at: the guideline is about the first growth alone; give steps or shares")
            at = guideline_steps(stack, growing.factor, tokens, steps)
        else:
            at = round(growing.at * steps) if growing.at < 1 else int(growing.at)
        if not 1 <= at < steps:
            raise UsageError(f"grow.{place}.at: got {growing.at}, the run has {steps} steps")
        if made and at <= made[-1].step:
            raise UsageError(f"grow.{place}.at: step {at} is not after step {made[-1].step} of the growth before")
        made.append(Stage(step=at, factor=growing.factor, order=growing.order, carry=growing.optimiser == "carry"))
    return tuple(made)


def sizes(recipe: RecipeFile) -> list[tuple[float, int]]:
    """For each stage of growth, the share of the steps that it has and how many times the layers are there.

    Raises:
        UsageError: a growth at a step, where the number of steps is not known yet.
    """
    ends = [growing.at for growing in recipe.grow]
    shares = [end for end in ends if not isinstance(end, str) and end < 1]
    if len(shares) != len(ends):
        raise UsageError(
            "grow.at: give a share between 0 and 1, since the recipe does not say how many steps there are"
        )
    found, before, times = [], 0.0, 1
    for end, growing in zip([*shares, 1.0], [*recipe.grow, None], strict=True):
        found.append((end - before, times))
        before, times = end, times * (growing.factor if growing else 1)
    return found


def steps_of(
    recipe: RecipeFile,
    stack: Stack,
    *,
    row_length: int,
    targets: int,
    step: Callable[[], object],
    look: Callable[[], object],
) -> int:
    """The steps that a recipe means.

    Args:
        recipe: with steps, tokens, flops or minutes.
        stack: before it grows.
        row_length: of its inputs, along their last axis.
        targets: of a batch, which tokens count.
        step: does one step on a copy, to be timed.
        look: looks at the held-out part once, to be timed.

    Raises:
        UsageError: less than one step fits.
    """
    train = recipe.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        found, what = train.tokens / targets, f"train.tokens: {train.tokens}"
    else:
        positions = step_tokens(stack, 1, row_length)
        plain = token_flops(stack, positions)
        relative = sum(share * token_flops(stack, positions, times) / plain for share, times in sizes(recipe))
        if train.flops is not None:
            spent = 3 * plain * step_tokens(stack, train.batch, row_length) * relative
            found, what = train.flops / spent, f"train.flops: {train.flops:g}"
        else:
            assert train.minutes is not None
            looking = _timed(look, 1) / train.evaluate if train.evaluate else 0.0
            found, what = (
                train.minutes * 60 / (_timed(step, TIMED) * relative + looking),
                f"train.minutes: {train.minutes:g}",
            )
    if found < 1:
        raise UsageError(
            f"{what} is less than one step, of which {found:.2g} fit; give more or make train.batch smaller"
        )
    return int(found)


def spent_flops(stack: Stack, stages: Sequence[Stage], steps: int, positions: int, rows: int) -> float:
    """FLOPs of a run, forward and backward.

    Args:
        stack: before it grows.
        stages: how it grows; those that come after the steps do not count.
        steps: updates.
        positions: of a row.
        rows: of a step.
    """
    total, times, before = 0.0, 1, 0
    past = [(stage.step, stage.factor) for stage in stages if stage.step < steps]
    for end, factor in [*past, (steps, 1)]:
        total += (end - before) * 3 * rows * positions * token_flops(stack, positions, times)
        before, times = end, times * factor
    return total


def _timed(run: Callable[[], object], times: int) -> float:
    """Seconds of a call, the median after one that is not counted where there are several."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return median(found[1:] or found)


def copied(stack: Stack) -> Stack:
    """A stack to try steps on."""
    return copy.deepcopy(stack)
