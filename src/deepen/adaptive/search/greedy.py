"""Greedy search: the cheapest loss first, then what improves at the same cost.

1. Every cheaper neighbour of the whole program is evaluated: what each removal costs alone.
2. Until the budget is met, the removal whose rise of the loss for the cost it saves is least is made. With few
   candidates left, only those are tried that did least harm alone.
3. Then any move that lowers the loss within the budget is made, one that overdraws it together with a removal.

Removing one layer at a time by the loss without it: "Shortened LLaMA", arXiv:2402.02834, which ranks once; here the
ranking is renewed after each removal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from deepen.adaptive.search.moves import Items, layers_of, text_of
from deepen.adaptive.search.problem import Problem, normal
from deepen.program import Ref
from deepen.registry import method

# Of the candidates that are left at the start of the descent, this share is kept for improvements.
KEPT = 0.25


@method(
    "greedy",
    family="search",
    source="arXiv:2402.02834",
    title="Shortened LLaMA",
    mechanism="remove what raises the loss least, ranked anew after each removal, then improve at the same cost",
    cost="at most layers x removals evaluations",
)
def greedy(problem: Problem) -> None:
    """Descends with one candidate at a time."""
    descend(problem, width=1)


def descend(problem: Problem, width: int) -> None:
    """Removes from the best `width` candidates at a time until they fit, then improves the best."""
    harm = alone(problem)
    problem.ask([ranked_once(problem, harm)])
    beam = [problem.whole]
    while over := [items for items in beam if not problem.fits(items)]:
        tried = max(2, breadth(problem, over))
        options: dict[str, Items] = {normal(items): items for items in beam if problem.fits(items)}
        for items in over:
            smaller = sorted(problem.smaller(items), key=lambda one: harm_of(problem, one, harm))
            options |= {normal(one): one for one in smaller[:tried]}
        beam = best_of(problem, list(options.values()), width)
    if beam:
        improve(problem, beam, harm)


def alone(problem: Problem) -> dict[str, float]:
    """What each removal from the whole program raises the loss by, by what is removed or left of it."""
    smaller = problem.smaller(problem.whole)
    # something that fits is known first, whatever the search is stopped by
    losses = problem.ask([problem.whole, problem.shrunk(problem.whole), *smaller])
    pairs = zip(smaller, losses[2:], strict=True)
    return {_change(problem.whole, one): loss - losses[0] for one, loss in pairs}


def ranked_once(problem: Problem, harm: Mapping[str, float]) -> Items:
    """The whole program without what does least harm alone, until it fits."""
    items = problem.whole
    while not problem.fits(items) and (smaller := problem.smaller(items)):
        items = min(smaller, key=lambda one: harm_of(problem, one, harm))
    return items


def _change(before: Items, after: Items) -> str:
    """What of a program is gone, and what stands for it: the name of a removal wherever it is made."""
    gone = tuple(item for item in before if item not in after)
    come = tuple(item for item in after if item not in before)
    return f"{text_of(gone)} -> {text_of(come)}"


def harm_of(problem: Problem, items: Items, harm: Mapping[str, float]) -> float:
    """The sum of what the removals raise the loss by alone; 0 for what is not known."""
    total = 0.0
    for item in problem.whole:
        if item in items:
            continue
        left = [one for one in items if isinstance(one, Ref) and one.parts and layers_of(one) == layers_of(item)]
        total += harm.get(_change((item,), tuple(left)), 0.0)
    return total


def breadth(problem: Problem, over: Sequence[Items]) -> int:
    """Removals to try for each candidate, so that what is left lasts until the budget is met."""
    left = problem.left()
    if math.isinf(left):
        return len(problem.whole) * 3
    most = max(problem.measure(items) for items in over)
    step = max((most - min(map(problem.measure, problem.smaller(over[0])), default=most)), 1e-12)
    levels = max(1, math.ceil((most - problem.limit) / step))
    return int(left * (1 - KEPT) / (levels * len(over)))


def best_of(problem: Problem, options: Sequence[Items], width: int) -> list[Items]:
    """The candidates of the least rise of the loss for the cost saved, in this order."""
    losses = problem.ask([problem.whole, *options])
    base, total = losses[0], problem.measure(problem.whole)

    def steepness(pair: tuple[Items, float]) -> tuple[float, float]:
        items, loss = pair
        saved = max(total - problem.measure(items), 1e-12)
        rise = loss - base
        return (rise / saved if rise > 0 else rise), loss

    ranked = sorted(zip(options, losses[1:], strict=True), key=steepness)
    return [items for items, _ in ranked[:width]]


def improve(problem: Problem, beam: Sequence[Items], harm: Mapping[str, float]) -> None:
    """Moves within the budget from the best of the beam for as long as one lowers the loss."""
    losses = problem.ask(beam)
    best, loss = min(zip(beam, losses, strict=True), key=lambda pair: pair[1])
    while True:
        options: dict[str, Items] = {}
        for one in problem.near(best):
            if problem.fits(one):
                options[normal(one)] = one
                continue
            # exchanges: what overdraws the budget, with the removal that did least harm alone
            within = [other for other in problem.smaller(one) if problem.fits(other)]
            for other in sorted(within, key=lambda items: harm_of(problem, items, harm))[:2]:
                options[normal(other)] = other
        options.pop(normal(best), None)
        ranked = sorted(options.values(), key=lambda items: harm_of(problem, items, harm))
        if not ranked:
            return
        found = problem.ask(ranked)
        lowest = min(range(len(ranked)), key=lambda at: found[at])
        if not found[lowest] < loss:
            return
        best, loss = ranked[lowest], found[lowest]
