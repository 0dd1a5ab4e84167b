"""The tape: a plan flattened to a stack machine over the stream x.

| op | does |
|---|---|
| `Run(visit)` | x = visit(x) |
| `Fork()` | push x |
| `Back()` | between two branches: keep x as a finished branch, x = the pushed stream |
| `Join(comb)` | closes a Fork; x is the last branch: x = x0 + sum or mean over the branches b of (b - x0); pop |
| `Blend(scale)` | closes a Fork with one body: x = x0 + scale (x - x0); pop |
| `Gate(own)` | the same with a factor that is a parameter |
| `Enter(own)` | a node begins that owns parameters: x = x + e, norm(x), or x joined with a recorded stream |
| `Record(name, exit)` | remember x under the name |
| `Turn(loop, turn)` | a turn of a loop whose count is chosen at run time begins |
| `Grad(on)` | what follows carries no gradient, or does again: the early turns of `grad=k` |

A node takes the stream through `inject`, `emb` and `norm` in this order, then through its body; `gate` and `scale` act
on what all of that changed, `gate` inside `scale`. Only these, `comb`, `kv`, `lora` (on the visit) and marks are in the
tape; every attribute is in `Plan.uses`, so that an executor refuses those it does not build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from deepen.program.owned import ENTRIES, Own, Place
from deepen.program.tree import Attr, Group, Loop, Mark, Node, Ref, Scope, Seq, value_of

if TYPE_CHECKING:
    from deepen.program.plan import Visit


@dataclass(frozen=True, slots=True)
class Run:
    """x = visit(x)."""

    visit: Visit


@dataclass(frozen=True, slots=True)
class Fork:
    """Push x."""


@dataclass(frozen=True, slots=True)
class Back:
    """Keep x as a finished branch and return to the pushed stream."""


@dataclass(frozen=True, slots=True)
class Join:
    """Close a Fork: combine the updates of the branches (`sum`, `mean` or `gate`) and pop."""

    comb: str


@dataclass(frozen=True, slots=True)
class Blend:
    """Close a Fork: damp or amplify the update of the body and pop."""

    scale: float


@dataclass(frozen=True, slots=True)
class Gate:
    """Close a Fork: weigh the update of the body with a parameter and pop."""

    own: Own


@dataclass(frozen=True, slots=True)
class Enter:
    """Change x where a node begins, by `inject`, `emb` or `norm`."""

    own: Own


@dataclass(frozen=True, slots=True)
class Record:
    """Remember x under the name."""

    name: str
    exit: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a loop whose count is chosen at run time begins."""

    loop: int
    turn: int


@dataclass(frozen=True, slots=True)
class Grad:
    """What follows carries gradients again (`on`), or none until the Grad that closes this one."""

    on: bool


Op: TypeAlias = Run | Fork | Back | Join | Blend | Gate | Enter | Record | Turn | Grad


@dataclass(frozen=True, slots=True)
class Places:
    """What is where in a numbered tree: visits by leaf and turns, owned parameters by place."""

    visits: Mapping[tuple[int, tuple[int, ...]], Visit]
    owned: Mapping[Place, Own]


def emit(node: Node, counts: Mapping[int, int], places: Places, turn: tuple[int, ...]) -> Iterator[Op]:
    """The ops of a numbered tree; loops not in `counts` run at their maximum."""
    match node:
        case Ref():
            yield Run(places.visits[node.leaf, turn])
        case Mark():
            yield Record(mark_name(node, turn), node.exit)
        case Seq(items=items):
            for item in items:
                yield from emit(item, counts, places, turn)
        case Group(branches=branches):
            for place, branch in enumerate(branches):
                yield Back() if place else Fork()
                yield from emit(branch, counts, places, turn)
            yield Join(str(value_of(node.attrs, "comb") or "sum"))
        case Scope(body=body):
            inner = _entered(emit(body, counts, places, turn), ("scope", node.number), places, turn)
            yield from _damped(inner, per_turn(node.attrs, "scale", 0))
        case Loop(body=body):
            turns = counts.get(node.number, node.high)
            kept = value_of(node.attrs, "grad")
            cut = max(0, turns - kept) if isinstance(kept, int) else 0
            if cut:
                yield Grad(on=False)
            for count in range(turns):
                if cut and count == cut:
                    yield Grad(on=True)
                if node.low != node.high:
                    yield Turn(node.number, count)
                passed = (*turn, count)
                inner = _entered(emit(body, counts, places, passed), ("loop", node.number), places, passed)
                yield from _damped(inner, per_turn(node.attrs, "scale", count))
            if cut == turns > 0:
                yield Grad(on=True)


def mark_name(mark: Mark, turn: tuple[int, ...]) -> str:
    """An exit inside loops has one name a turn, `NAME.0`; a label is overwritten each turn."""
    return ".".join((mark.name, *map(str, turn))) if mark.exit else mark.name


def per_turn(attrs: tuple[Attr, ...], name: str, turn: int) -> Fraction:
    """The number that an attribute such as `scale`, `res` or `cap` has in a turn; 1 where it is absent."""
    values = value_of(attrs, name)
    if values is None:
        return Fraction(1)
    assert isinstance(values, tuple)
    return values[turn % len(values)]


def _entered(ops: Iterator[Op], node: tuple[str, int], places: Places, turn: tuple[int, ...]) -> Iterator[Op]:
    """One passage over a node with what it owns."""
    gate = places.owned.get(("gate", node, turn))
    if gate is not None:
        yield Fork()
    for kind in ENTRIES:
        if (own := places.owned.get((kind, node, turn))) is not None:
            yield Enter(own)
    yield from ops
    if gate is not None:
        yield Gate(gate)


def _damped(ops: Iterator[Op], scale: Fraction) -> Iterator[Op]:
    if scale == 1:
        yield from ops
        return
    yield Fork()
    yield from ops
    yield Blend(float(scale))
