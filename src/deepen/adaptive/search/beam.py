"""Beam search: greedy search that keeps several candidates at each level.

    level 0   whole
    level 1   the WIDTH best programs with one removal
    level 2   the WIDTH best of all that one more removal makes of these ...

Programs of one level begin alike, so most of their visits are shared.
"""

from __future__ import annotations

from deepen.adaptive.search.greedy import descend
from deepen.adaptive.search.problem import Problem
from deepen.registry import method

WIDTH = 4


@method(
    "beam",
    family="search",
    source="doi:10.1184/R1/6609821.v1",
    title="The HARPY Speech Recognition System",
    mechanism="removals from the best four programs of each level, then improvement at the same cost",
    cost="at most 4 x layers x removals evaluations; fewer candidates narrow each level",
)
def beam(problem: Problem) -> None:
    """Descends with several candidates at a time."""
    descend(problem, width=WIDTH)
