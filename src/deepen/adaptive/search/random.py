"""Random search: what any other method must beat.

A candidate is the whole program with some random moves that do not shrink it, then shrunk at random into the budget.
"""

from __future__ import annotations

from deepen.adaptive.search.moves import drop, part
from deepen.adaptive.search.problem import Problem, normal
from deepen.registry import method

# Candidates drawn at a time, and without a limit in all.
DRAWN, MOST = 16, 200
# Draws that give nothing new before the search ends: all there is has been seen.
STALE = 50


@method(
    "random",
    family="search",
    source="arXiv:1902.08142",
    title="Evaluating the Search Phase of Neural Architecture Search",
    mechanism="programs drawn at random within the budget; the baseline of every search",
    cost="one evaluation a candidate",
)
def random(problem: Problem) -> None:
    """Draws candidates until all are used up, or no new ones come."""
    seen: set[str] = set()
    while problem.left() > 0 and len(seen) < (problem.candidates or MOST):
        drawn = []
        for _ in range(STALE):
            items = problem.shrunk(_varied(problem))
            if (text := normal(items)) not in seen:
                seen.add(text)
                drawn.append(items)
            if len(drawn) == DRAWN:
                break
        if not drawn:
            return
        problem.ask(drawn)


def _varied(problem: Problem):
    """The whole program after up to two random moves of those that do not shrink."""
    items = problem.whole
    others = {name: move for name, move in problem.moves.items() if move not in (drop, part)}
    for _ in range(problem.dice.randint(0, 2)):
        name = problem.dice.choice(sorted(others)) if others else ""
        options = list(others[name](items, problem.bank)) if name else []
        items = problem.dice.choice(options) if options else items
    return items
