"""Visits of layers that are visited already, through copies with weights of their own.

0 1 0 1                    ->   0-1 0! 1!          training a copy moves nothing else
the function it begins at  =    0-1 0-1            a copy begins with the weights of its layer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deepen.errors import ProgramError
from deepen.program.format import format_node
from deepen.program.tree import Copy, Index, Loop, Node, Ref, Seq, rebuild
from deepen.surgery.place import stretch, tower_key

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


def fresh(layers: Iterable[int | Ref]) -> str:
    """The text that visits these layers in this order: each is itself the first time, and a copy every later time."""
    refs = [Ref(Index(layer)) if isinstance(layer, int) else layer for layer in layers]
    seen: set[tuple[int, str | None]] = set()
    items: list[Node] = []
    for ref in refs:
        name = (ref.first.value, ref.parts)
        items.append(replace(ref, copy=Copy()) if name in seen else ref)
        seen.add(name)
    return format_node(Seq(tuple(items)))


def plain_visits(ck: Checkpoint, tower: str, name: str) -> tuple[list[Node], list[Ref], list[Node]]:
    """What the program begins with, all its visits, and what it ends with.

    Raises:
        ProgramError: it is not a plain list of layers: it has loops, groups or copies, or marks between layers.
    """
    visits = ck.plan(tower_key(ck, tower)[0].name).visits
    if copied := next((visit.key for visit in visits if visit.key.copy is not None), None):
        raise ProgramError(f"{name}: `{ck.program}` has the copy {copied}; save the checkpoint and open the result")
    found = stretch(ck, tower, visits[0].key.layer, visits[-1].key.layer, name)
    if len(found[1]) != len(visits):
        raise ProgramError(f"{name}: `{ck.program}` is not a plain list of layers, without loops, groups and copies")
    return found


def start_of(ck: Checkpoint, tower: str) -> Checkpoint:
    """The checkpoint whose function one with copies begins at: each copy is the layer that it is a copy of."""
    key = tower_key(ck, tower)[1]
    return ck.apply(ck.program.with_tower(key, _shared(ck.program.tree(key))))


def measured(ck: Checkpoint, same: Checkpoint, measure: bool) -> dict[str, object]:
    """The fields of a report that say which program a result equals, and by how much, if that is to be measured."""
    from deepen.surgery.report import logit_difference

    difference = {"max_logit_difference": logit_difference(ck, same)} if measure else {}
    return {"same_as": str(same.program), **difference}


def _shared(node: Node) -> Node:
    if isinstance(node, Loop) and node.fresh:
        node = replace(node, fresh=False)
    if isinstance(node, Ref):
        begins = node.copy is not None and node.copy.label is None and node.copy.init in (None, "copy")
        return replace(node, copy=None) if begins else node
    return rebuild(node, _shared)


def blocks_of(refs: Sequence[Ref], size: int) -> list[list[Ref]]:
    """The visits in blocks of `size`, which divides their number."""
    return [list(refs[at : at + size]) for at in range(0, len(refs), size)]
