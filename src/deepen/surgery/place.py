"""Where in a program a transform works: the stretch between two layers, and what takes its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from deepen.errors import ProgramError, UsageError
from deepen.program import Program
from deepen.program.format import format_node
from deepen.program.normal import normalise
from deepen.program.tree import Node, Ref, Seq

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower


def tower_key(ck: Checkpoint, tower: str) -> tuple[Tower, str]:
    """A tower, and the name that the program uses for it: none when the model has only one.

    Raises:
        FamilyError: no such tower, or the empty name is ambiguous.
    """
    found = ck.family.tower(tower)
    return found, found.name if len(ck.family.towers) > 1 else ""


def require_layers(ck: Checkpoint, tower: Tower, layers: Iterable[int]) -> None:
    """Refuses numbers that are no stored layers.

    Raises:
        ProgramError: names the first of them and the layers that exist.
    """
    depth = ck.depth[tower.name]
    for layer in layers:
        if not 0 <= layer < depth:
            raise ProgramError(f"layer {layer} does not exist (the {tower.name} tower stores {depth}: 0-{depth - 1})")


def require_run(ck: Checkpoint, tower: Tower, first: int, last: int) -> None:
    """Refuses a run of layers that does not exist or runs backwards.

    Raises:
        ProgramError: a layer that does not exist.
        UsageError: `first` is not below `last`.
    """
    require_layers(ck, tower, (first, last))
    if first >= last:
        raise UsageError(f"layers {first} to {last}: expected at least two, the lower number first")


def stretch(ck: Checkpoint, tower: str, first: int, last: int, name: str) -> tuple[list[Node], list[Ref], list[Node]]:
    """The elements of the program before, from and after the stretch between the visits of two layers.

    Raises:
        ProgramError: a layer is not visited exactly once outside of loops and groups, or the stretch is not a plain
            list of visits.
    """
    found, key = tower_key(ck, tower)
    require_layers(ck, found, (first, last))
    program = ck.program
    items = list(normalise(program.tree(key), ck.depth[found.name], program.text).items)
    at = [_position(program, items, layer, name) for layer in (first, last)]
    if at[0] > at[1]:
        raise ProgramError(f"{name}: layer {first} is visited after layer {last}", str(program))
    body = items[at[0] : at[1] + 1]
    refs = [item for item in body if isinstance(item, Ref)]
    if len(refs) != len(body) or any(ref.attrs or ref.copy for ref in refs):
        text = format_node(Seq(tuple(body)))
        raise ProgramError(f"{name}: `{text}` is not a plain list of layers, without loops, groups, marks and copies")
    return items[: at[0]], refs, items[at[1] + 1 :]


def _position(program: Program, items: Sequence[Node], layer: int, name: str) -> int:
    places = [at for at, item in enumerate(items) if isinstance(item, Ref) and item.first.value == layer]
    if len(places) != 1:
        seen = f"at {len(places)} places" if places else "nowhere outside of loops and groups"
        raise ProgramError(f"{name}: layer {layer} is visited {seen} in `{program}`; expected exactly one")
    return places[0]


def joined(ck: Checkpoint, tower: str, before: Sequence[Node], text: str, after: Sequence[Node]) -> Checkpoint:
    """The checkpoint with `text` in the place of a stretch.

    Raises:
        ProgramError: nothing is left.
    """
    parts = (format_node(Seq(tuple(items))) if items else "" for items in (before, after))
    ahead, behind = parts
    body = " ".join(filter(None, (ahead, text, behind)))
    if not body:
        raise ProgramError("the program would visit no layer; expected at least one to stay", str(ck.program))
    key = tower_key(ck, tower)[1]
    return ck.apply(ck.program.with_tower(key, body))
