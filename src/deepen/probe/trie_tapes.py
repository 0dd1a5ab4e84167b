"""Many tapes as one trie: what they have in common from the start is run once.

    0-9 11-29       0 .. 9 -+- 11 .. 29
    0-9 10 12-29            +- 10 -+- 12 .. 29
    0-10 11 13-29                  +- 11 13 .. 29

A branch is a stretch of operations that ends where programs end or part. Where it parts, its stream is kept until its
last child has started, and a stream inside a group also keeps what the group will need. The child that needs most is
run last, when its parent's stream is no longer kept: the trie of all single removals keeps one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from deepen.program import Back, Blend, Fork, Join, Op, Plan, Record, Run, Turn


class Step(NamedTuple):
    """A visit as far as it changes the stream: the layer it runs and the parts."""

    layer: int
    parts: str


Move: TypeAlias = Step | Op


@dataclass(frozen=True)
class Branch:
    """A stretch of operations.

    Attributes:
        moves: what is run.
        ends: the programs whose tape ends with this branch.
        children: how it goes on, in the order in which they are run.
        size: streams that make up the state at its end; 0 at the start of all tapes, which is at hand anyway.
    """

    moves: tuple[Move, ...]
    ends: tuple[int, ...]
    children: tuple[Branch, ...]
    size: int

    @cached_property
    def need(self) -> int:
        """Streams kept at the same time for what is below, at most."""
        needs = [child.need + self.size for child in self.children[:-1]]
        return max([*needs, *(child.need for child in self.children[-1:])], default=0)

    @cached_property
    def visits(self) -> int:
        """Layer visits of the branch and all below."""
        return steps(self.moves) + sum(child.visits for child in self.children)


def moves_of(plan: Plan) -> tuple[Move, ...] | None:
    """What the plan does to the stream, loops at their maximum; None where a visit is more than its layer and parts.

    That is so for a copy that does not start equal to its layer, for keys and values shared between turns, and where
    the program owns parameters.
    """
    if plan.owned or any(init != "copy" for init in plan.inits.values()):
        return None
    if any(visit.slot is not None and not visit.writes for visit in plan.visits):
        return None
    return tuple(
        Step(op.visit.key.layer, op.visit.parts) if isinstance(op, Run) else op
        for op in plan.tape()
        if not isinstance(op, Turn | Record)
    )


def steps(moves: Sequence[Move]) -> int:
    """How many of the moves are visits."""
    return sum(isinstance(move, Step) for move in moves)


def grow(tapes: Mapping[int, tuple[Move, ...]]) -> Branch:
    """The trie of some tapes, which shares all that can be shared."""
    return _grow(tuple(tapes), tapes, 0)


def _grow(members: tuple[int, ...], tapes: Mapping[int, tuple[Move, ...]], start: int) -> Branch:
    first = tapes[members[0]]
    stop = start
    while all(len(tapes[member]) > stop and tapes[member][stop] == first[stop] for member in members):
        stop += 1
    groups: dict[Move, list[int]] = {}
    for member in members:
        if len(tapes[member]) > stop:
            groups.setdefault(tapes[member][stop], []).append(member)
    children = sorted((_grow(tuple(group), tapes, stop) for group in groups.values()), key=lambda child: child.need)
    ends = tuple(member for member in members if len(tapes[member]) == stop)
    return Branch(first[start:stop], ends, tuple(children), held(first[:stop]) if stop else 0)


def held(moves: Sequence[Move]) -> int:
    """Streams that make up the state after these moves: the stream, and for each open fork its entry and branches."""
    forks: list[int] = []
    for move in moves:
        if isinstance(move, Fork):
            forks.append(1)
        elif isinstance(move, Back):
            forks[-1] += 1
        elif isinstance(move, Join | Blend):
            forks.pop()
    return 1 + sum(forks)


def within(branch: Branch, limit: int) -> Branch:
    """The same programs with at most `limit` streams kept; what cannot be kept is run again."""
    found = _within(branch, limit)
    return found[0] if len(found) == 1 else Branch((), (), tuple(found), 0)


def _within(branch: Branch, limit: int) -> list[Branch]:
    if branch.need <= limit:
        return [branch]
    if branch.size > limit:
        return list(_chains(branch, ()))
    pieces = [piece for child in branch.children for piece in _within(child, limit - branch.size)]
    return [Branch(branch.moves, branch.ends, tuple(pieces), branch.size)]


def _chains(branch: Branch, before: tuple[Move, ...]) -> Iterator[Branch]:
    """Each place where programs end, as one stretch without branches."""
    moves = before + branch.moves
    if branch.ends:
        yield Branch(moves, branch.ends, (), 0)
    for child in branch.children:
        yield from _chains(child, moves)
