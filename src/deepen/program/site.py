"""Sites: what a wiring reads for and writes to, one for each part of each visit."""

from __future__ import annotations

from dataclasses import dataclass

from deepen.program.plan import Plan
from deepen.program.tree import Key


@dataclass(frozen=True, slots=True)
class Site:
    """One part of one visit.

    Attributes:
        visit: index of the visit, with every loop at its maximum.
        key: the layer.
        part: `a` or `f`.
        index: rank among the sites in execution order.
        total: the number of sites.
        turn: the turns of the enclosing loops, from outside in.
    """

    visit: int
    key: Key
    part: str
    index: int
    total: int
    turn: tuple[int, ...]


def sites(plan: Plan) -> tuple[tuple[Site, ...], ...]:
    """The sites of each visit of a plan, in execution order."""
    total = sum(len(visit.parts) for visit in plan.visits)
    found, index = [], 0
    for visit in plan.visits:
        own = enumerate(visit.parts, index)
        found.append(tuple(Site(visit.index, visit.key, part, rank, total, visit.turn) for rank, part in own))
        index += len(visit.parts)
    return tuple(found)
