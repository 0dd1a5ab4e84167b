"""Checks of a normalised tree that need no model; all of them run before any weight is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepen.errors import ProgramError, nearest
from deepen.program.attributes import ATTRIBUTES
from deepen.program.format import format_node
from deepen.program.normal import normalise
from deepen.program.tree import Attr, Group, Key, Loop, Mark, Node, Ref, Scope, Seq, children, value_of, walk

MAX_VISITS = 4096
_OF_A_LOOP = ("first", "last", "mean")


def size(node: Node, text: str = "") -> int:
    """How many steps the node expands to, counted without expanding it.

    Raises:
        ProgramError: more than the limit, naming the innermost loop that exceeds it.

    """
    match node:
        case Ref(first=first, last=last, stride=stride) if last is not None and first.from_end == last.from_end:
            total = abs(last.value - first.value) // stride + 1
        case Loop(body=body, high=high):
            total = max(high, 1) * max(size(body, text), 1)
            if total > MAX_VISITS:
                written = format_node(normalise(node))
                written = written if len(written) <= 40 else f"{written[:18]}..{written[-18:]}"
                reason = f"the loop `{written}` expands to {total} visits, the limit is {MAX_VISITS}"
                raise ProgramError(reason, text, node.column)
        case Ref() | Mark():
            total = 1
        case _:
            total = sum(size(child, text) for child in children(node))
    if total > MAX_VISITS:
        column = node.column if isinstance(node, Ref) else None
        raise ProgramError(f"{total} visits, the limit is {MAX_VISITS}", text, column)
    return total


def visits(node: Node) -> int:
    """How many visits of layers the normalised tree makes with every loop at its maximum."""
    match node:
        case Ref():
            return 1
        case Loop(body=body, high=high):
            return high * visits(body)
        case _:
            return sum(visits(child) for child in children(node))


@dataclass(frozen=True, slots=True)
class _Around:
    """What encloses a node."""

    loops: int = 0
    group: bool = False
    pooled: bool = False


def check(tree: Seq, text: str = "") -> None:
    """Check a normalised tree.

    Raises:
        ProgramError: the first rule that does not hold, with its column.

    """
    if not visits(tree):
        raise ProgramError("a program visits at least one layer", text, 1)
    _check_marks(tree, text)
    _check_copies(tree, text)
    _check(tree, _Around(), text)
    _known_after(tree, frozenset(), frozenset(m.name for m in walk(tree) if isinstance(m, Mark) and not m.exit), text)


def attrs_of(node: Node) -> tuple[Attr, ...]:
    """The attributes written on the node itself."""
    return () if isinstance(node, Seq) else node.attrs


def _check_marks(tree: Seq, text: str) -> None:
    seen: set[str] = set()
    for node in walk(tree):
        if isinstance(node, Mark):
            if node.name in seen:
                raise ProgramError(f"the mark {node.name!r} is given twice", text, node.column)
            seen.add(node.name)


def _check_copies(tree: Seq, text: str) -> None:
    inits: dict[Key, str] = {}
    for node in walk(tree):
        if isinstance(node, Ref) and node.copy and node.copy.label and node.copy.init and not node.first.from_end:
            key = Key(node.first.value, node.copy.label)
            if inits.setdefault(key, node.copy.init) != node.copy.init:
                reason = f"the copy {key} has two initial values: {inits[key]} and {node.copy.init}"
                raise ProgramError(reason, text, node.copy.column)


def _check(node: Node, around: _Around, text: str) -> None:
    for attr in attrs_of(node):
        _check_attr(node, attr, around, text)
    match node:
        case Mark(exit=True):
            if around.group or around.pooled:
                place = "inside { }" if around.group else "under res below 1"
                raise ProgramError(f"the exit ?{node.name} cannot stand {place}", text, node.column)
            if node.name == "main" and around.loops:
                raise ProgramError("?main cannot stand inside a loop", text, node.column)
        case Loop() | Scope():
            res = value_of(node.attrs, "res")
            pooled = around.pooled or (isinstance(res, tuple) and any(share != 1 for share in res))
            loops = around.loops + isinstance(node, Loop)
            around = replace(around, loops=loops, pooled=pooled)
        case Group():
            around = replace(around, group=True)
        case _:
            pass
    for child in children(node):
        _check(child, around, text)


def _check_attr(node: Node, attr: Attr, around: _Around, text: str) -> None:
    if isinstance(node, Mark):
        return
    row = ATTRIBUTES[attr.name]
    value = attr.value
    if row.needs and value_of(attrs_of(node), row.needs) is None:
        raise ProgramError(f"{attr.name} needs {row.needs} beside it", text, attr.column)
    if row.turns and isinstance(value, tuple) and len(value) > 1:
        if not isinstance(node, Loop):
            reason = f"{attr.name} has {len(value)} values, one for each turn, but stands on no loop"
            raise ProgramError(reason, text, attr.column)
        if node.low != node.high:
            reason = f"{attr.name} takes one value on a loop whose count is chosen at run time"
            raise ProgramError(reason, text, attr.column)
        if len(value) != node.high:
            reason = f"{attr.name} has {len(value)} values, the loop has {node.high} turns"
            raise ProgramError(reason, text, attr.column)
    kind = value[0] if isinstance(value, tuple) and value else value
    if attr.name == "kv" and kind in (*_OF_A_LOOP, "cyc") and not isinstance(node, Loop) and not around.loops:
        raise ProgramError(f"kv={kind} stands inside a loop only", text, attr.column)
    if attr.name == "draw" and isinstance(node, Loop) and node.low == node.high:
        raise ProgramError("draw needs a loop with a range of counts, n..m", text, attr.column)
    if attr.name == "solve" and isinstance(node, Scope) and not all(isinstance(i, Ref) for i in _items(node.body)):
        raise ProgramError("solve needs a plain list of layers", text, attr.column)


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Seq) else (node,)


def _labels(attrs: tuple[Attr, ...]) -> Iterator[tuple[str, Attr]]:
    for attr in attrs:
        if attr.name == "inject" and isinstance(attr.value, tuple):
            yield attr.value[0], attr
        if attr.name == "topo" and isinstance(attr.value, tuple) and attr.value[0] == "anchor":
            yield attr.value[1], attr


def _known_after(node: Node, known: frozenset[str], named: frozenset[str], text: str) -> frozenset[str]:
    """The labels that have surely been executed after the node, given those before it."""
    for label, attr in _labels(attrs_of(node)):
        if label not in named:
            raise ProgramError(f"there is no label @{label}{nearest(label, named)}", text, attr.column)
        if label not in known:
            raise ProgramError(f"the label @{label} is not executed before this on every path", text, attr.column)
    if isinstance(node, Mark):
        return known if node.exit else known | {node.name}
    if isinstance(node, Group):
        # branches start from the same stream: none sees a label of another
        return known.union(*(_known_after(branch, known, named, text) for branch in node.branches))
    after = known
    for child in children(node):
        after = _known_after(child, after, named, text)
    skipped = (isinstance(node, Loop) and node.low == 0) or value_of(attrs_of(node), "when") is not None
    return known if skipped else after
