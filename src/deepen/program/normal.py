"""From the tree as written to the normal tree: runs written out, postfixes distributed, bare groups spliced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deepen.errors import ProgramError
from deepen.program.attributes import ATTRIBUTES
from deepen.program.tree import Attr, Copy, Group, Index, Loop, Mark, Node, Ref, Scope, Seq, rebuild, several


def normalise(node: Node, depth: int | None = None, text: str = "") -> Seq:
    """The normal tree. Without a depth, layers counted from the end (`^1`) stay as written.

    Raises:
        ProgramError: with a depth, a layer that the bank does not have.

    """
    return Seq(tuple(_elements(node, depth, text)))


def _elements(node: Node, depth: int | None, text: str) -> list[Node]:
    match node:
        case Ref():
            if node.copy is not None and node.copy == Copy(init="copy"):
                node = replace(node, copy=replace(node.copy, init=None))
            return [] if node.parts == "" else list(_layers(node, depth, text))
        case Seq(items=items):
            return [element for item in items for element in _elements(item, depth, text)]
        case Group(branches=branches):
            return [replace(node, branches=tuple(normalise(branch, depth, text) for branch in branches))]
        case Loop(body=body) | Scope(body=body):
            inner = _elements(body, depth, text)
            if isinstance(body, Seq):
                return [replace(node, body=_unit(inner))]
            return [replace(node, body=element) for element in inner]
        case Mark():
            return [node]


def _unit(elements: list[Node]) -> Node:
    """One element stands without parentheses, unless a postfix on it would go to each of several layers."""
    if len(elements) == 1 and not isinstance(elements[0], Mark) and not several(elements[0]):
        return elements[0]
    return Seq(tuple(elements))


def _layers(ref: Ref, depth: int | None, text: str) -> Iterable[Ref]:
    first, last = ref.first, ref.last or ref.first
    if depth is None and (first.from_end or last.from_end):
        # `4-4` is a run of one layer whatever the depth
        return [replace(ref, last=None, stride=1) if first == last else ref]
    low = first.value if depth is None else first.resolve(depth, text)
    high = last.value if depth is None else last.resolve(depth, text)
    if depth is not None and ref.end is not None:
        ref.end.resolve(depth, text)
    step = ref.stride if low <= high else -ref.stride
    layers = range(low, high + (1 if step > 0 else -1), step)
    end = ref.end or Index(layers[-1], column=last.column)
    return [replace(ref, first=Index(i, column=first.column), last=None, stride=1, end=end) for i in layers]


def narrow(node: Node, part: str) -> Node:
    """Keep one part of every visit below: the postfix `.a`, `.f`, `.c`."""
    if isinstance(node, Ref):
        kept = part if node.parts is None or part in node.parts else ""
        return replace(node, parts=kept)
    return rebuild(node, lambda child: narrow(child, part))


def copied(node: Node, copy: Copy, text: str) -> Node:
    """Make every visit below one of a copy: the postfix `!`. The outer of two initial values holds.

    Raises:
        ProgramError: a labelled copy lies below; its label says that it is the same layer wherever it is named.

    """
    if isinstance(node, Ref):
        inner = node.copy
        if inner is not None and inner.label is not None:
            raise ProgramError(f"the copy !{inner.label} has a label and cannot be copied again", text, copy.column)
        init = copy.init or (inner.init if inner else None)
        return replace(node, copy=replace(copy, init=init))
    return rebuild(node, lambda child: copied(child, copy, text))


def pushed(node: Node, attr: Attr) -> Node:
    """Hand an attribute of visits down to every visit below; one that stands nearer to the visit holds."""
    if isinstance(node, Ref | Loop) and any(own.name == attr.name for own in node.attrs):
        return node
    if isinstance(node, Ref):
        return replace(node, attrs=ordered((*node.attrs, attr)))
    return rebuild(node, lambda child: pushed(child, attr))


def ordered(attrs: Iterable[Attr]) -> tuple[Attr, ...]:
    """Attributes in the order of their names: the order they were written in means nothing."""
    return tuple(sorted(attrs, key=lambda attr: attr.name))


def goes_down(attr: Attr) -> bool:
    """Whether the attribute belongs to visits, not to the node it is written on."""
    return "visit" in ATTRIBUTES[attr.name].places
