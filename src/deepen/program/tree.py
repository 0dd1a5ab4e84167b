"""The tree of a program: what the parser builds, the plan expands and the formatter prints.

A postfix whose body is a `Seq` acts on the body as a unit. A postfix that sits directly on a `Ref` of several layers
acts on each of them: `0-3[scale=1/2]` damps four layers one by one, `(0-3)[scale=1/2]` damps them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from deepen.errors import ProgramError


class Key(NamedTuple):
    """The name of a layer of the bank, or of a copy of one: `3`, `3!1`, `3!b`."""

    layer: int
    copy: str | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.copy is None else f"{self.layer}!{self.copy}"


@dataclass(frozen=True, slots=True)
class Attr:
    """One attribute as it stands in the text, its value parsed."""

    name: str
    value: object
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Index:
    """A layer number, counted from the start (`3`) or from the end (`^1` is the last layer)."""

    value: int
    from_end: bool = False
    column: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return f"^{self.value}" if self.from_end else f"{self.value}"

    def resolve(self, depth: int, text: str = "") -> int:
        """The layer number in a bank of `depth` layers.

        Raises:
            ProgramError: the bank has no such layer.

        """
        layer = depth - self.value if self.from_end else self.value
        if not 0 <= layer < depth or (self.from_end and self.value == 0):
            known = f"^{depth}-^1" if self.from_end else f"0-{depth - 1}"
            raise ProgramError(f"layer {self} does not exist (the model has {depth}: {known})", text, self.column)
        return layer


@dataclass(frozen=True, slots=True)
class Copy:
    """A `!`: the label of the copy, or None for a fresh one; its initial value, or None when it is not stated."""

    label: str | None = None
    init: str | None = None
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Ref:
    """A layer, or a run of layers `first-last/stride`, with what is said about each of its visits."""

    first: Index
    last: Index | None = None
    stride: int = 1
    parts: str | None = None
    copy: Copy | None = None
    attrs: tuple[Attr, ...] = ()
    leaf: int = field(default=-1, compare=False)
    # the last layer of the run as written, so that an error can point at it
    end: Index | None = field(default=None, compare=False)

    @property
    def column(self) -> int:
        return self.first.column

    @property
    def bare(self) -> bool:
        """Whether nothing is said about the visit, so that neighbours may be written as one run."""
        return self.parts is None and self.copy is None and not self.attrs


@dataclass(frozen=True, slots=True)
class Mark:
    """`@name` remembers the stream, `?name` is an exit: the final norm and the head may be applied here."""

    name: str
    exit: bool = False
    attrs: tuple[Attr, ...] = ()
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Seq:
    """Items one after the other; the empty sequence is the identity, written `_`."""

    items: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """The body `low` to `high` times; with `fresh`, every turn but the first uses copies of its own."""

    body: Node
    low: int
    high: int
    fresh: bool = False
    attrs: tuple[Attr, ...] = ()
    column: int = field(default=1, compare=False)
    number: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Branches that all read the same stream: `{P|Q}`."""

    branches: tuple[Seq, ...]
    attrs: tuple[Attr, ...] = ()
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Scope:
    """A node with attributes: `(P)[scale=1/2]`."""

    body: Node
    attrs: tuple[Attr, ...]
    column: int = field(default=1, compare=False)
    number: int = field(default=-1, compare=False)


Node: TypeAlias = Seq | Loop | Group | Scope | Mark | Ref


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below."""
    match node:
        case Seq(items=items):
            return items
        case Group(branches=branches):
            return branches
        case Loop(body=body) | Scope(body=body):
            return (body,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, in text order."""
    yield node
    for child in children(node):
        yield from walk(child)


def rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with `change` applied to each of its children."""
    match node:
        case Seq(items=items):
            return Seq(tuple(change(item) for item in items))
        case Group(branches=branches):
            return replace(node, branches=tuple(as_seq(change(branch)) for branch in branches))
        case Loop(body=body) | Scope(body=body):
            return replace(node, body=change(body))
        case _:
            return node


def as_seq(node: Node) -> Seq:
    """The node as a sequence."""
    return node if isinstance(node, Seq) else Seq((node,))


def several(node: Node) -> bool:
    """Whether a postfix on the node goes to each of several layers (a run that reaches to or from `^n`)."""
    match node:
        case Ref(last=last):
            return last is not None
        case Loop(body=body) | Scope(body=body):
            return several(body)
        case _:
            return False


def value_of(attrs: tuple[Attr, ...], name: str) -> object | None:
    """The value of the attribute `name`, or None."""
    return next((attr.value for attr in attrs if attr.name == name), None)
