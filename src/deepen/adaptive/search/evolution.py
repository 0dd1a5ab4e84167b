"""Evolution: programs that change and cross, the best of a few becoming parents.

    parent = best of TOURNAMENT drawn from the living      child = a random move of a parent, or head of one + tail of
    the oldest of POPULATION dies for each child           another; shrunk at random into the budget

Aging tournaments: "Regularized Evolution for Image Classifier Architecture Search", arXiv:1802.01548.
"""

from __future__ import annotations

from deepen.adaptive.search.moves import Items
from deepen.adaptive.search.problem import Problem, normal
from deepen.registry import method

POPULATION, CHILDREN, TOURNAMENT, MOST = 24, 8, 5, 400
# How many children in a row may be known already before the search ends.
STALE = 200
# Share of the children that cross two parents.
CROSSED = 0.25


@method(
    "evolution",
    family="search",
    source="arXiv:1802.01548",
    title="Regularized Evolution for Image Classifier Architecture Search",
    mechanism="aging tournaments; children by a random move or by crossing two parents",
    cost="one evaluation a child",
)
def evolution(problem: Problem) -> None:
    """Breeds until all candidates are used up, or no new children come."""
    first = list({normal(items): items for _ in range(POPULATION) if (items := problem.shrunk(problem.whole))}.values())
    living = list(zip(first, problem.ask(first), strict=True))
    seen = {normal(items) for items in first}
    stale = 0
    while stale < STALE and len(seen) < (problem.candidates or MOST):
        children: list[Items] = []
        while len(children) < CHILDREN and stale < STALE:
            child = _child(problem, living)
            stale += 1
            if (text := normal(child)) not in seen:
                seen.add(text)
                children.append(child)
                stale = 0
        living += zip(children, problem.ask(children), strict=True)
        living = living[-POPULATION:]


def _child(problem: Problem, living: list[tuple[Items, float]]) -> Items:
    items = _parent(problem, living)
    if problem.dice.random() < CROSSED:
        other = _parent(problem, living)
        at = problem.dice.randint(0, min(len(items), len(other)))
        items = (*items[:at], *other[at:]) or items
    elif options := _options(problem, items):
        items = problem.dice.choice(options)
    return problem.shrunk(items)


def _options(problem: Problem, items: Items) -> list[Items]:
    """What one move, drawn first so that moves with many results are not preferred, makes of the program."""
    name = problem.dice.choice(sorted(problem.moves))
    return list(problem.moves[name](items, problem.bank))


def _parent(problem: Problem, living: list[tuple[Items, float]]) -> Items:
    some = problem.dice.sample(living, min(TOURNAMENT, len(living)))
    return min(some, key=lambda pair: pair[1])[0]
