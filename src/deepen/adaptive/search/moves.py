r"""Moves: from a program to those that lie one change away.

A candidate is the sequence of elements of a program: single layers, and around layers at most one loop, group or scale.

| move | example |
|---|---|
| drop | `0 1 2` to `0 2` |
| part | `0 1 2` to `0 1.f 2` and `0 1.a 2` |
| restore | a layer that is not visited comes back to its place; `1.f`, `1*2`, `{1\|2}`, `1[scale=1/2]` become plain |
| repeat | `0 1 2` to `0 1*2 2`, `1*2` to `1*3` |
| loop | `0 1 2 3` to `0 (1-2)*2 3`, stretches of 2 to 4 layers |
| swap | `0 1 2` to `1 0 2`: neighbours change places |
| move | `0 1 2 3` to `0 2 3 1`: a layer goes somewhere else |
| group | `0 1 2` to `0 {1\|2}`: neighbours side by side |
| scale | `0 1 2` to `0 1[scale=1/2] 2` and `[scale=2]`: an update damped or amplified |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from deepen.errors import UsageError, nearest
from deepen.program import Attr, Group, Index, Loop, Node, Ref, Scope, Seq
from deepen.program.format import format_node
from deepen.program.tree import walk

Items: TypeAlias = tuple[Node, ...]

LONGEST_LOOP = 4
SCALES = (Fraction(1, 2), Fraction(2))


@dataclass(frozen=True)
class Bank:
    """What moves may use.

    Attributes:
        depth: layers of the bank.
        letters: the parts that may be run alone; empty when a layer is one piece.
    """

    depth: int
    letters: str


Move: TypeAlias = Callable[[Items, Bank], Iterator[Items]]


def text_of(items: Items) -> str:
    """The candidate as the text of a program."""
    return format_node(Seq(items))


def layers_of(node: Node) -> list[int]:
    """The layers that a node visits, in text order."""
    return [below.first.value for below in walk(node) if isinstance(below, Ref)]


def drop(items: Items, bank: Bank) -> Iterator[Items]:
    for at in range(len(items)):
        if len(items) > 1:
            yield _put(items, at, 1)


def part(items: Items, bank: Bank) -> Iterator[Items]:
    for at, item in enumerate(items):
        if _plain(item) and len(bank.letters) > 1:
            yield from (_put(items, at, 1, replace(item, parts=letter)) for letter in bank.letters)


def restore(items: Items, bank: Bank) -> Iterator[Items]:
    for at, item in enumerate(items):
        if not _plain(item):
            # a copy keeps its label: it is another layer
            yield _put(items, at, 1, *(Ref(Index(layer)) for layer in dict.fromkeys(layers_of(item))))
    visited = {layer for item in items for layer in layers_of(item)}
    for layer in range(bank.depth):
        if layer not in visited:
            later = (at for at, item in enumerate(items) if min(layers_of(item)) > layer)
            yield _put(items, next(later, len(items)), 0, Ref(Index(layer)))


def repeat(items: Items, bank: Bank) -> Iterator[Items]:
    for at, item in enumerate(items):
        if _plain(item):
            yield _put(items, at, 1, Loop(item, 2, 2))
        elif isinstance(item, Loop) and not item.attrs and not item.fresh:
            yield _put(items, at, 1, replace(item, low=item.low + 1, high=item.high + 1))


def loop(items: Items, bank: Bank) -> Iterator[Items]:
    for at in range(len(items)):
        for length in range(2, LONGEST_LOOP + 1):
            body = items[at : at + length]
            if len(body) == length and all(map(_plain, body)):
                yield _put(items, at, length, Loop(Seq(body), 2, 2))


def swap(items: Items, bank: Bank) -> Iterator[Items]:
    for at in range(len(items) - 1):
        yield _put(items, at, 2, items[at + 1], items[at])


def move(items: Items, bank: Bank) -> Iterator[Items]:
    for at, item in enumerate(items):
        rest = _put(items, at, 1)
        yield from (_put(rest, to, 0, item) for to in range(len(items)) if abs(to - at) > 1)


def group(items: Items, bank: Bank) -> Iterator[Items]:
    for at in range(len(items) - 1):
        one, two = items[at : at + 2]
        if _plain(one) and _plain(two):
            yield _put(items, at, 2, Group((Seq((one,)), Seq((two,)))))


def scale(items: Items, bank: Bank) -> Iterator[Items]:
    for at, item in enumerate(items):
        if _plain(item):
            yield from (_put(items, at, 1, Scope(item, (Attr("scale", (value,)),))) for value in SCALES)


MOVES: Mapping[str, Move] = {
    move.__name__: move for move in (drop, part, restore, repeat, loop, swap, move, group, scale)
}
DEFAULT = ("drop", "restore", "swap")


def chosen(names: Sequence[str]) -> dict[str, Move]:
    """The moves of these names, in the order of the table.

    Raises:
        UsageError: an unknown name, or none that makes a program smaller.
    """
    for name in names:
        if name not in MOVES:
            raise UsageError(f"no move {name!r}{nearest(name, MOVES)}; known are {', '.join(MOVES)}")
    if not {"drop", "part"} & set(names):
        raise UsageError(f"the moves {', '.join(names) or '(none)'} make no program smaller; add drop or part")
    return {name: MOVES[name] for name in MOVES if name in names}


def neighbours(items: Items, bank: Bank, moves: Mapping[str, Move]) -> list[Items]:
    """Every candidate one move away, each once."""
    found = {text_of(one): one for each in moves.values() for one in each(items, bank)}
    found.pop(text_of(items), None)
    return list(found.values())


def _plain(item: Node) -> bool:
    """A layer of the bank with all its parts and nothing said about the visit."""
    return isinstance(item, Ref) and item.bare


def _put(items: Items, at: int, count: int, *new: Node) -> Items:
    return (*items[:at], *new, *items[at + count :])
