"""A program expanded for a bank: its visits with their keys and cache slots, and the tape that an executor runs.

Cache slots. A visit that runs a mixer needs a slot. With `kv=own` (the default) every visit has its own; a slot is
the rank of the visit among those that need one and own it, with every loop at its maximum.

| kv | slot of a visit | writes |
|---|---|---|
| `own` | its own | yes |
| `first` | that of the same visit in turn 0 of the loop | in turn 0 only |
| `last`, `mean` | that of the same visit in turn 0 of the loop | every turn |
| `cyc:N` | that of the same visit in turn t mod N of the loop | every turn |
| NAME | one for all visits of that name | the first visit only |
| `none` | none | no |

The loop that a rule refers to: on a loop, `(4-7)*3[kv=first]`, that loop, also for visits in loops further inside.
On a layer or a group, `(4-7)[kv=first]*3`, the rule goes down to the visits, and refers to the innermost loop around
each of them: for a body without loops of its own the two say the same. The rule nearest to the visit holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from deepen.errors import ProgramError
from deepen.program.check import attrs_of, check, size
from deepen.program.format import format_node
from deepen.program.normal import goes_down, normalise
from deepen.program.owned import Own, Place, owned
from deepen.program.tape import Op, Places, Record, emit
from deepen.program.tree import Attr, Group, Key, Loop, Mark, Node, Ref, Scope, Seq, rebuild, value_of, walk


@dataclass(frozen=True, slots=True)
class Visit:
    """One execution of a layer.

    Attributes:
        index: rank in execution order with every loop at its maximum.
        key: the layer it runs.
        parts: the parts it runs, such as `"af"`.
        leaf: running number of the layer in the text, written out.
        turn: the turns of the enclosing loops, from outside in.
        attrs: the attributes of the visit (`kv`, `lora`, `shard`) with parsed values.
        slot: its cache slot, None when it needs none.
        writes: whether it writes the slot.
        loops: the numbers of the enclosing loops, from outside in.
        lora: the adapters that it runs with, None when it has none.

    """

    index: int
    key: Key
    parts: str
    leaf: int
    turn: tuple[int, ...]
    attrs: Mapping[str, object] = field(hash=False)
    slot: int | None
    writes: bool
    loops: tuple[int, ...]
    lora: Own | None = None


@dataclass(frozen=True, slots=True)
class LoopInfo:
    """A loop of the plan: its number in text order from 0, its counts, whether its turns are copies, its text."""

    number: int
    minimum: int
    maximum: int
    fresh: bool
    text: str
    column: int


@dataclass(frozen=True, slots=True)
class Use:
    """An attribute that the program uses, and where: on a visit, node, loop, group or mark."""

    name: str
    value: object
    where: str
    column: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A program expanded for a bank of `depth` layers.

    Attributes:
        depth: the number of layers of the bank.
        root: the tree with one leaf a layer, loops not expanded, groups of one branch gone.
        visits: in execution order, with every loop at its maximum.
        keys: in order of first use, which is their order in the bank after a save.
        slots: the number of cache slots.
        inits: the initial value of each copy: `copy`, `zero` or `rand`.
        loops: by number, in text order.
        marks: the names of the records in execution order.
        uses: every attribute of the text.
        warnings: what is legal but probably not meant.
        text: the program as written.
        owned: the parameters that the program owns beside its layers, by the place where each is used.

    """

    depth: int
    root: Node
    visits: tuple[Visit, ...]
    keys: tuple[Key, ...]
    slots: int
    inits: Mapping[Key, str] = field(hash=False)
    loops: tuple[LoopInfo, ...]
    marks: tuple[str, ...]
    uses: tuple[Use, ...]
    warnings: tuple[str, ...]
    text: str
    owned: Mapping[Place, Own] = field(hash=False)

    def tape(self, counts: Mapping[int, int] | None = None) -> tuple[Op, ...]:
        """The ops at these loop counts, by loop number; a loop that is not named runs at its maximum.

        The visits are those of `visits`: same index, same slot.

        Raises:
            ProgramError: an unknown loop, or a count outside its range.

        """
        for number, turns in (counts or {}).items():
            if not 0 <= number < len(self.loops):
                raise ProgramError(f"there is no loop {number}, the program has {len(self.loops)}", self.text)
            loop = self.loops[number]
            if not loop.minimum <= turns <= loop.maximum:
                reason = f"{turns} turns: loop {number}, `{loop.text}`, takes {loop.minimum} to {loop.maximum}"
                raise ProgramError(reason, self.text, loop.column)
        by_place = {(visit.leaf, visit.turn): visit for visit in self.visits}
        return tuple(emit(self.root, counts or {}, Places(by_place, self.owned), ()))


def make_plan(tree: Seq, depth: int, parts: Sequence[str], text: str = "") -> Plan:
    """Expand a normalised tree; see `Program.plan`.

    Raises:
        ProgramError: the tree does not fit the bank.

    """
    if len(parts) != depth:
        raise ValueError(f"{len(parts)} sets of parts for {depth} layers")
    resolved = normalise(tree, depth, text)
    size(resolved, text)
    check(resolved, text)
    root = _numbered(resolved, count(), count(), count())
    passages = list(_passages(root, (), ()))
    keys = _keys(passages)
    slots = _slots(passages, [_parts(passage.ref, parts, text) for passage in passages])
    own = owned(root)
    visits = tuple(
        Visit(
            index=index,
            key=key,
            parts=_parts(passage.ref, parts, text),
            leaf=passage.ref.leaf,
            turn=passage.turn,
            attrs={attr.name: attr.value for attr, _ in passage.attrs},
            slot=slot,
            writes=writes,
            loops=tuple(loop.number for loop in passage.loops),
            lora=own.get(("lora", ("leaf", passage.ref.leaf), passage.turn)),
        )
        for index, (passage, key, (slot, writes)) in enumerate(zip(passages, keys, slots, strict=True))
    )
    loops = tuple(
        LoopInfo(node.number, node.low, node.high, node.fresh, format_node(node), node.column)
        for node in walk(root)
        if isinstance(node, Loop)
    )
    by_place = {(visit.leaf, visit.turn): visit for visit in visits}
    marked = any(isinstance(node, Mark) for node in walk(root))
    records = (op.name for op in emit(root, {}, Places(by_place, own), ()) if isinstance(op, Record)) if marked else ()
    return Plan(
        depth=depth,
        root=root,
        visits=visits,
        keys=tuple(dict.fromkeys(keys)),
        slots=len({slot for slot, _ in slots if slot is not None}),
        inits=_inits(passages, keys),
        loops=loops,
        marks=tuple(dict.fromkeys(records)),
        uses=tuple(dict.fromkeys(_uses(root))),
        warnings=tuple(_warnings(visits, depth)),
        text=text,
        owned=own,
    )


@dataclass(frozen=True, slots=True)
class _Passage:
    """One passage of the tree over a leaf, with the attributes that hold there and the loop each refers to."""

    ref: Ref
    turn: tuple[int, ...]
    loops: tuple[Loop, ...]
    attrs: tuple[tuple[Attr, int], ...]


def _numbered(node: Node, leaves: Iterator[int], loops: Iterator[int], scopes: Iterator[int]) -> Node:
    match node:
        case Ref():
            return replace(node, leaf=next(leaves))
        case Loop():
            node = replace(node, number=next(loops))
        case Scope():
            node = replace(node, number=next(scopes))
        case Group(branches=(only,)) if value_of(node.attrs, "comb") != "gate":
            return _numbered(only, leaves, loops, scopes)
        case _:
            pass
    return rebuild(node, lambda child: _numbered(child, leaves, loops, scopes))


def _passages(node: Node, loops: tuple[Loop, ...], turn: tuple[int, ...]) -> Iterator[_Passage]:
    match node:
        case Ref():
            yield _Passage(node, turn, loops, tuple(_in_force(node, loops)))
        case Seq(items=items) | Group(branches=items):
            for item in items:
                yield from _passages(item, loops, turn)
        case Scope(body=body):
            yield from _passages(body, loops, turn)
        case Loop(body=body):
            for passed in range(node.high):
                yield from _passages(body, (*loops, node), (*turn, passed))
        case Mark():
            return


def _in_force(ref: Ref, loops: tuple[Loop, ...]) -> Iterator[tuple[Attr, int]]:
    """The attributes of a visit, nearest first, with the position of the loop that each refers to."""
    seen: set[str] = set()
    places = [(ref.attrs, len(loops) - 1), *((loops[place].attrs, place) for place in reversed(range(len(loops))))]
    for attrs, place in places:
        for attr in attrs:
            if goes_down(attr) and attr.name not in seen:
                seen.add(attr.name)
                yield attr, place


def _parts(ref: Ref, parts: Sequence[str], text: str) -> str:
    layer = ref.first.value
    own = parts[layer]
    if ref.parts is None:
        return own
    if ref.parts not in own:
        names = ", ".join(own) or "none"
        raise ProgramError(f"layer {layer} has no part {ref.parts} of its own (its parts: {names})", text, ref.column)
    return ref.parts


def _keys(passages: Sequence[_Passage]) -> list[Key]:
    """The keys of the visits; fresh copies of a layer are numbered from 1 by first use."""
    copies: dict[int, dict[tuple[int, ...], str]] = {}
    keys = []
    for passage in passages:
        layer, copy = passage.ref.first.value, passage.ref.copy
        fresh = tuple(turn for turn, loop in zip(passage.turn, passage.loops, strict=True) if loop.fresh)
        label = None
        if copy is not None and copy.label is not None:
            label = copy.label
        elif copy is not None or any(fresh):
            of_layer = copies.setdefault(layer, {})
            label = of_layer.setdefault((passage.ref.leaf, *fresh), f"{len(of_layer) + 1}")
        keys.append(Key(layer, label))
    return keys


def _inits(passages: Sequence[_Passage], keys: Sequence[Key]) -> dict[Key, str]:
    inits: dict[Key, str] = {}
    for passage, key in zip(passages, keys, strict=True):
        if key.copy is not None:
            stated = passage.ref.copy.init if passage.ref.copy else None
            inits[key] = stated or inits.get(key, "copy")
    return inits


def _slots(passages: Sequence[_Passage], parts: Sequence[str]) -> list[tuple[int | None, bool]]:
    """The slot of each visit and whether the visit writes it; the table at the head of the file."""
    ranks: dict[object, int] = {}
    slots: list[tuple[int | None, bool]] = []
    for passage, own in zip(passages, parts, strict=True):
        rule, loop = next(((a.value, place) for a, place in passage.attrs if a.name == "kv"), ("own", -1))
        if "a" not in own or rule == "none":
            slots.append((None, False))
            continue
        turn, writes = list(passage.turn), True
        place: object
        match rule:
            case "own":
                pass
            case "first" | "last" | "mean":
                writes = rule != "first" or turn[loop] == 0
                turn[loop] = 0
            case ("cyc", int(period)):
                turn[loop] %= period
            case _:
                writes = rule not in ranks
        place = rule if isinstance(rule, str) and rule not in _RULES else (passage.ref.leaf, *turn)
        slots.append((ranks.setdefault(place, len(ranks)), writes))
    return slots


_RULES = ("own", "first", "last", "mean")


def _uses(node: Node) -> Iterator[Use]:
    where = {Ref: "visit", Scope: "node", Loop: "loop", Group: "group", Mark: "mark"}
    for below in walk(node):
        for attr in attrs_of(below):
            yield Use(attr.name, attr.value, where[type(below)], attr.column)


def _warnings(visits: Sequence[Visit], depth: int) -> Iterator[str]:
    layers = list(dict.fromkeys(visit.key.layer for visit in visits))
    if depth - 1 not in layers:
        yield f"the last layer of the model, {depth - 1}, is never visited"
    if not any("a" in visit.parts for visit in visits):
        yield "no visit mixes tokens: the program has no attention"
    if any(before > after for before, after in pairwise(layers)):
        yield "the layers are first visited in another order than they were trained in"
    for kind in ("last", "mean"):
        if any(visit.attrs.get("kv") == kind for visit in visits):
            yield f"kv={kind} is for evaluation: in training, cached and uncached runs differ"
