"""Which sites and visits the entries of a wiring's parameters belong to, so that a change of the program carries them.

| parameter | entries |
|---|---|
| a row for each site | `Entries("gains", None, (((SITE, 0), (SITE, 1), ...),))` |
| a list, one for each visit, with a weight a source | `Entries("weights", (VISIT, 5), (((SOURCE, 0), ...),))` |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

# A source is what a visit left, counted from 1, or the embedding, 0. What is fixed is there under every program.
SITE, VISIT, SOURCE, FIXED = "site", "visit", "source", "fixed"
# A kind, a number that a change of the program translates, and what else tells entries apart.
Label: TypeAlias = tuple[str | int, ...]


class Entries(NamedTuple):
    """What a parameter belongs to.

    Attributes:
        group: its name, without the number that it has in a list.
        owner: what it belongs to as a whole; None for a parameter that is there once.
        axes: of the leading axes, what their entries belong to; an axis of None is the same under every program.
        fresh: the value of new entries in a parameter that is carried; None is what they begin with.
    """

    group: str
    owner: Label | None = None
    axes: tuple[Sequence[Label] | None, ...] = ()
    fresh: float | None = None


def numbered(kind: str, count: int) -> list[Label]:
    """Labels 0, 1 ... of a kind."""
    return [(kind, number) for number in range(count)]


def rows(labels: Sequence[Label], *names: str) -> dict[str, Entries]:
    """Parameters whose rows belong to these."""
    return {name: Entries(name, None, (labels,)) for name in names}


def listed(labels: Iterable[Label], *names: str) -> dict[str, Entries]:
    """Lists of parameters, each of which belongs to one of these."""
    return {f"{name}.{place}": Entries(name, label) for place, label in enumerate(labels) for name in names}
