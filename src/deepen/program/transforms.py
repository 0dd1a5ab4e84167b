"""Text transforms: a program to a program, and a note of what was done. They touch no weight.

Each works on the tree of one tower as it stands, so transforms compose: `loop` of a pruned program loops what is left.
Positions are given by the layer that is visited there; where that is not one place, the transform refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from deepen.errors import ProgramError
from deepen.program.format import format_node
from deepen.program.normal import normalise
from deepen.program.program import Program
from deepen.program.tree import Attr, Copy, Group, Index, Loop, Mark, Node, Ref, Scope, Seq, as_seq, rebuild, walk

ALL_PARTS = "afc"


def prune(program: Program, layers: Iterable[int], depth: int, tower: str = "") -> tuple[Program, str]:
    """Drop every visit of these layers.

    Raises:
        ProgramError: a layer that the program does not visit, or nothing is left.

    """
    gone = sorted(set(layers))
    tree = _tree(program, depth, tower)
    visited = [node.first.value for node in walk(tree) if isinstance(node, Ref)]
    _known(program, gone, visited)
    kept = _without(tree, lambda ref: ref.first.value in gone)
    dropped = sum(layer in gone for layer in visited)
    return _made(program, tower, kept), f"dropped layers {_list(gone)} at {dropped} places in the text"


def loop(
    program: Program, first: int, last: int, count: int | str, depth: int, attrs: str = "", tower: str = ""
) -> tuple[Program, str]:
    """Repeat the stretch from layer `first` to layer `last`; `count` is n or `"n..m"`, `attrs` such as `"kv=first"`.

    Raises:
        ProgramError: the two layers do not stand once each, in this order, outside of groups and loops.

    """
    before, body, after = _stretch(program, first, last, depth, tower)
    written = f"({_text(body)})*{count}" + (f"[{attrs}]" if attrs else "")
    return _joined(program, tower, before, written, after), f"looped `{_text(body)}` {count} times"


def stack(program: Program, times: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """The whole program `times` over, each turn after the first with copies of its own.

    Raises:
        ProgramError: the program has labelled copies.

    """
    text = _text(_tree(program, depth, tower).items)
    return _joined(program, tower, (), f"({text})*!{times}", ()), f"stacked the program {times} times as copies"


def interleave(program: Program, times: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """Each element `times` over in place, each turn after the first a copy: `0*!2 1*!2 ..`.

    Raises:
        ProgramError: the program has labelled copies.

    """
    items = _tree(program, depth, tower).items
    texts = (format_node(item) if isinstance(item, Mark) else f"({format_node(item)})*!{times}" for item in items)
    elements = sum(not isinstance(item, Mark) for item in items)
    return _joined(program, tower, (), " ".join(texts), ()), f"repeated {elements} elements {times} times as copies"


def insert_zero(program: Program, every: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """After every `every`-th visit a copy of its layer that starts as the identity: `0-3 3!zero 4-7 7!zero`.

    Raises:
        ProgramError: `every` is below 1, or the program is not a plain list of layers.

    """
    if every < 1:
        raise ProgramError(f"a copy after every {every} visits is not possible", program.text)
    items: list[Node] = []
    seen = 0
    for item in _plain(program, depth, tower, "insert_zero"):
        items.append(item)
        if isinstance(item, Ref):
            seen += 1
            if seen % every == 0:
                items.append(Ref(item.first, copy=Copy(init="zero")))
    return _made(program, tower, Seq(tuple(items))), f"inserted {seen // every} copies that start as the identity"


def upscale(program: Program, overlap: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """Two passes that overlap, the second one of copies: all but the last `overlap`, then all but the first `overlap`.

    Raises:
        ProgramError: the overlap is not below the number of visits, or the program is not a plain list of layers.

    """
    items = tuple(item for item in _plain(program, depth, tower, "upscale") if isinstance(item, Ref))
    if not 0 <= overlap < len(items):
        raise ProgramError(f"an overlap of {overlap} does not fit {len(items)} visits", program.text)
    first, second = items[: len(items) - overlap], items[overlap:]
    made = _joined(program, tower, first, f"({_text(second)})!", ())
    return made, f"upscaled {len(items)} visits to {len(first) + len(second)}, {len(second)} of them copies"


def fuse(program: Program, first: int, last: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """The feed-forward parts of the stretch side by side, its mixers dropped: `{8.f|9.f|10.f}`.

    Raises:
        ProgramError: the stretch is not a plain list of layers.

    """
    before, body, after = _stretch(program, first, last, depth, tower)
    refs = _plain_refs(program, body, "fuse")
    group = f"{{{'|'.join(format_node(ref) + '.f' for ref in refs)}}}"
    note = f"fused the feed-forward parts of {len(refs)} layers, dropped their mixers"
    return _joined(program, tower, before, group, after), note


def parallel(program: Program, first: int, last: int, width: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """Runs of `width` elements of the stretch side by side; a rest of one stays as it is.

    Raises:
        ProgramError: a width below 2, or marks in the stretch.

    """
    if width < 2:
        raise ProgramError(f"groups of {width} are not parallel", program.text)
    before, body, after = _stretch(program, first, last, depth, tower)
    if any(isinstance(item, Mark) for item in body):
        raise ProgramError("parallel: the stretch has marks, which cannot stand side by side with layers", program.text)
    runs = [body[at : at + width] for at in range(0, len(body), width)]
    texts = [f"{{{'|'.join(map(format_node, run))}}}" if len(run) > 1 else _text(run) for run in runs]
    groups = sum(len(run) > 1 for run in runs)
    return _joined(program, tower, before, " ".join(texts), after), f"set {len(body)} elements in {groups} groups"


def reverse(program: Program, first: int, last: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """The elements of the stretch in reverse order.

    Raises:
        ProgramError: the two layers do not stand once each, in this order, outside of groups and loops.

    """
    before, body, after = _stretch(program, first, last, depth, tower)
    return _joined(program, tower, before, _text(body[::-1]), after), f"reversed {len(body)} elements"


def permute(program: Program, order: Sequence[int], depth: int, tower: str = "") -> tuple[Program, str]:
    """The visits in another order, given by their layers.

    Raises:
        ProgramError: the program is not a plain list of layers, or `order` does not name each of its visits once.

    """
    refs = _plain_refs(program, _tree(program, depth, tower).items, "permute")
    by_layer = {ref.first.value: ref for ref in refs}
    if len(by_layer) != len(refs):
        raise ProgramError("permute: a layer is visited more than once", program.text)
    if sorted(order) != sorted(by_layer):
        raise ProgramError(
            f"permute: the order names {_list(order)}, the program visits {_list(by_layer)}", program.text
        )
    moved = sum(ref.first.value != layer for ref, layer in zip(refs, order, strict=True))
    return _made(program, tower, Seq(tuple(by_layer[layer] for layer in order))), f"moved {moved} visits"


def tie(program: Program, groups: Iterable[Sequence[int]], depth: int, tower: str = "") -> tuple[Program, str]:
    """Visit the first layer of each group wherever one of its others was visited.

    Raises:
        ProgramError: a layer is in two groups, or is not visited.

    """
    groups = [tuple(group) for group in groups if group]
    named = [layer for group in groups for layer in group]
    if len(set(named)) != len(named):
        raise ProgramError("tie: a layer stands in two groups", program.text)
    tree = _tree(program, depth, tower)
    _known(program, named, [node.first.value for node in walk(tree) if isinstance(node, Ref)])
    to = {layer: group[0] for group in groups for layer in group}

    def tied(node: Node) -> Node:
        if isinstance(node, Ref):
            return replace(node, first=Index(to.get(node.first.value, node.first.value)), end=None)
        return rebuild(node, tied)

    note = f"tied {len(named)} layers to {len(groups)}: " + "; ".join(f"{_list(g[1:])} to {g[0]}" for g in groups)
    return _made(program, tower, tied(tree)), note


def untie(program: Program, depth: int, tower: str = "") -> tuple[Program, str]:
    """Give every visit that shares its layer a copy of its own: loops become `*!`, later visits `l!`.

    Raises:
        ProgramError: a loop whose count is chosen at run time.

    """
    tree = _tree(program, depth, tower)
    inits: dict[tuple[int, str | None], str] = {
        (node.first.value, node.copy.label): node.copy.init
        for node in walk(tree)
        if isinstance(node, Ref) and node.copy and node.copy.label and node.copy.init
    }
    seen: dict[int, set[str]] = {}
    changed = 0

    def own(node: Node) -> Node:
        nonlocal changed
        if isinstance(node, Loop) and not node.fresh:
            if node.low != node.high:
                reason = f"untie: the count of `{format_node(node)}` is chosen at run time, fix it first"
                raise ProgramError(reason, program.text)
            changed += 1
            node = replace(node, fresh=True)
        if not isinstance(node, Ref):
            return rebuild(node, own)
        if node.copy is not None:
            changed += node.copy.label is not None
            init = node.copy.init or inits.get((node.first.value, node.copy.label))
            return replace(node, copy=Copy(init=init))
        parts = set(node.parts or ALL_PARTS)
        used = seen.setdefault(node.first.value, set())
        shared = bool(parts & used)
        used |= parts
        changed += shared
        return replace(node, copy=Copy()) if shared else node

    return _made(program, tower, own(tree)), f"untied {changed} loops and visits"


def relax(program: Program, rank: int, depth: int, tower: str = "") -> tuple[Program, str]:
    """Give each turn of every outermost loop with shared layers adapters of its own: `(P)*n[lora=r]`.

    Raises:
        ProgramError: no loop shares its layers.

    """
    changed = 0

    def relaxed(node: Node) -> Node:
        nonlocal changed
        if isinstance(node, Loop) and not node.fresh:
            if all(attr.name != "lora" for attr in node.attrs):
                changed += 1
                node = replace(node, attrs=(*node.attrs, Attr("lora", rank)))
            return node
        return rebuild(node, relaxed)

    tree = relaxed(_tree(program, depth, tower))
    if not changed:
        raise ProgramError("relax: no loop shares its layers without adapters", program.text)
    return _made(program, tower, tree), f"gave each turn of {changed} loops adapters of rank {rank}"


def exits(program: Program, after: Iterable[int], depth: int, attrs: str = "", tower: str = "") -> tuple[Program, str]:
    """An exit mark `?e<layer>` after each of these layers, with attributes such as `"conf=0.9"`.

    Raises:
        ProgramError: a layer that does not stand exactly once outside of groups and loops.

    """
    items = list(_tree(program, depth, tower).items)
    texts = [format_node(item) for item in items]
    names = []
    for layer in sorted(set(after)):
        names.append(f"e{layer}")
        texts[_position(program, items, layer)] += f" ?e{layer}" + (f"[{attrs}]" if attrs else "")
    return _joined(program, tower, (), " ".join(texts), ()), f"added the exits {', '.join(names)}"


def _tree(program: Program, depth: int, tower: str) -> Seq:
    return normalise(program.tree(tower), depth, program.text)


def _made(program: Program, tower: str, tree: Node) -> Program:
    return program.with_tower(tower, tree)


def _joined(program: Program, tower: str, before: Sequence[Node], text: str, after: Sequence[Node]) -> Program:
    return program.with_tower(tower, " ".join(filter(None, (_text(before), text, _text(after)))))


def _text(items: Sequence[Node]) -> str:
    return format_node(Seq(tuple(items))) if items else ""


def _list(layers: Iterable[int]) -> str:
    return ", ".join(map(str, layers))


def _known(program: Program, layers: Iterable[int], visited: Iterable[int]) -> None:
    missing = sorted(set(layers) - set(visited))
    if missing:
        raise ProgramError(f"the program does not visit layer {_list(missing)}", program.text)


def _plain(program: Program, depth: int, tower: str, name: str) -> tuple[Node, ...]:
    items = _tree(program, depth, tower).items
    if not all(isinstance(item, Ref | Mark) for item in items):
        raise ProgramError(f"{name} needs a plain list of layers, without loops, groups and scopes", program.text)
    return items


def _plain_refs(program: Program, items: Sequence[Node], name: str) -> list[Ref]:
    refs = [item for item in items if isinstance(item, Ref)]
    if len(refs) != len(items):
        raise ProgramError(f"{name} needs a plain list of layers, without marks, loops and groups", program.text)
    return refs


def _position(program: Program, items: Sequence[Node], layer: int) -> int:
    places = [at for at, item in enumerate(items) if isinstance(item, Ref) and item.first.value == layer]
    if len(places) > 1:
        raise ProgramError(f"layer {layer} is visited at {len(places)} places: write the program by hand", program.text)
    if not places:
        for item in items:
            if any(isinstance(node, Ref) and node.first.value == layer for node in walk(item)):
                raise ProgramError(f"layer {layer} stands inside `{format_node(item)}`", program.text)
        raise ProgramError(f"the program does not visit layer {layer}", program.text)
    return places[0]


def _stretch(
    program: Program, first: int, last: int, depth: int, tower: str
) -> tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]]:
    """The elements before, from and after the stretch between two layers."""
    items = _tree(program, depth, tower).items
    start, stop = (_position(program, items, layer) for layer in (first, last))
    if start > stop:
        raise ProgramError(f"layer {first} is visited after layer {last}", program.text)
    return items[:start], items[start : stop + 1], items[stop + 1 :]


def _without(node: Node, gone: Callable[[Ref], bool]) -> Node:
    """The tree without some visits; what is left empty goes as well."""
    match node:
        case Seq(items=items):
            left = (_without(item, gone) for item in items if not (isinstance(item, Ref) and gone(item)))
            return Seq(tuple(item for item in left if item != Seq()))
        case Loop(body=body) | Scope(body=body):
            inner = Seq() if isinstance(body, Ref) and gone(body) else _without(body, gone)
            return Seq() if inner == Seq() else replace(node, body=inner)
        case Group(branches=branches):
            # a branch that was `_` from the start stays; one that is emptied goes, so that a mean is over what is left
            pairs = [(branch, as_seq(_without(branch, gone))) for branch in branches]
            kept = tuple(after for before, after in pairs if after != Seq() or before == Seq())
            if all(branch == Seq() for branch in kept):
                return Seq()
            return replace(node, branches=kept) if len(kept) > 1 else Seq(kept)
        case _:
            return node
