"""Sites: what a wiring reads for and writes to, one for each part of each visit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Depth(NamedTuple):
    """What constants of depth count, every loop at its maximum.

    Attributes:
        blocks: blocks of two sites.
        layers: layers of the bank.
        visits: visits.
        ranks: of each site, its rank among the sites.
        places: of each site, the visit that it belongs to, from 0.
        rounds: of each site, how many visits run its part of its layer.
    """

    blocks: float
    layers: int
    visits: int
    ranks: tuple[int, ...]
    places: tuple[int, ...]
    rounds: tuple[int, ...]


def depth(sites: Sequence[Site], layers: int, visits: int) -> Depth:
    """What constants of depth count of a program with these sites."""
    times = Counter((site.key, site.part) for site in sites)
    rounds = tuple(times[site.key, site.part] for site in sites)
    ranks, places = tuple(site.index for site in sites), tuple(site.visit for site in sites)
    return Depth(len(sites) / 2, layers, visits, ranks, places, rounds)
