"""The published rule: drop the contiguous block of layers over which the stream turns least.

    D[l, n] = mean angular distance between the stream before visit l and after visit l + n - 1
    drop l .. l + n - 1,  l = argmin D[l, n]

n is the least number of layers whose removal fits the budget. "The Unreasonable Ineffectiveness of the Deeper Layers",
arXiv:2403.17887. The paper heals the model afterwards; here nothing is trained.
"""

from __future__ import annotations

import math

from deepen.adaptive.search.moves import layers_of
from deepen.adaptive.search.problem import Problem
from deepen.errors import UsageError
from deepen.program import Ref
from deepen.registry import method


@method(
    "contiguous",
    family="search",
    source="arXiv:2403.17887",
    title="The Unreasonable Ineffectiveness of the Deeper Layers",
    mechanism="drop the block of layers over which the stream turns least",
    cost="one pass for the distances, one evaluation",
)
def contiguous(problem: Problem) -> None:
    """Asks for one candidate.

    Raises:
        UsageError: the program is not a plain list of layers, or no block is long enough.
    """
    whole = problem.whole
    if not all(isinstance(item, Ref) and item.bare and len(layers_of(item)) == 1 for item in whole):
        raise UsageError("contiguous drops a block of a plain list of layers; choose another method for this program")
    distances = problem.distances()
    for length in range(len(whole)):
        blocks = [
            (float(distances[first][length]), first)
            for first in range(len(whole) - length + 1)
            if problem.fits((*whole[:first], *whole[first + length :])) and not math.isnan(distances[first][length])
        ]
        if blocks:
            _, first = min(blocks)
            problem.ask([(*whole[:first], *whole[first + length :])])
            return
    raise UsageError("no block of layers is long enough to meet the budget; choose another method")
