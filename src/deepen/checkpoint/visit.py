r"""A layer list that runs a tape: its children are the bank, its iteration is the visits.

    for layer in self.layers: x = layer(x, ...)      the forward of a Hugging Face model, unchanged
                     |
                     v
    entry 0   entry 1   entry 2 ...                  one per visit, in execution order
       \        /         |
        bank layer 0     bank layer 1                the children: original parameter names, stored once

An entry does the fork, join, scale and marks of the tape around its visit, shows its layer the visit's slot of the
cache, and delegates every attribute to the layer. It never writes to the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from deepen.checkpoint.family import Tower
from deepen.checkpoint.live import LiveConfig
from deepen.checkpoint.owned_maps import OWNED, label, part_maps
from deepen.checkpoint.slots import Shared, keep_slots, view
from deepen.checkpoint.views import absent, adapted, seen_with
from deepen.errors import DeepenError, FamilyError
from deepen.program import Back, Blend, Enter, Fork, Gate, Join, Op, Own, Plan, Record, Run, Turn, Visit
from deepen.sublayers.owned import Lora, branches

CACHE_NAMES = ("cache", "past_key_values", "layer_past", "layer_state")
# The stream at an open fork, and the branches that are finished.
Forked = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(slots=True, eq=False)
class Pass:
    """What one forward pass carries between visits: open forks, and keys and values shared by turns."""

    forks: list[Forked] = field(default_factory=list)
    shared: dict[int, Shared] = field(default_factory=dict)


class VisitList(nn.ModuleList):
    """The bank of a tower, iterated by visit.

    Args:
        layers: the bank, in the order of `plan.keys`.
        plan: the tower's plan.
        tower: the tower's family entry.
        live: the model's config, brought along whenever the tape changes.
        sets: the parameters that the program owns, by their names; they become the child `owned`.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        plan: Plan,
        tower: Tower,
        live: LiveConfig,
        sets: Mapping[str, nn.Module] = {},
    ) -> None:
        self.entries: tuple[Entry, ...] = ()
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        if sets:
            self.add_module(OWNED, branches(sets))
        self.sets = dict(sets)
        self.plan, self.tower, self.live = plan, tower, live
        self.state = Pass()
        self.marks: dict[str, torch.Tensor] = {}
        self.counts: dict[int, int] = {}
        self.set_counts({})

    def set_counts(self, counts: Mapping[int, int]) -> None:
        """Chooses how often each run-time loop runs, by its number; loops not named run their maximum.

        Raises:
            ProgramError: a count outside the loop's range.
            FamilyError: the first layer executed would no longer be the one that owns what only the first may own.
        """
        tape = self.plan.tape(counts)
        visits = [op.visit for op in tape if isinstance(op, Run)]
        if not visits:
            raise FamilyError("with these loop counts the program visits no layer; raise a count")
        if self.tower.first and visits[0].key != self.plan.keys[0]:
            raise FamilyError(
                f"with these loop counts layer {visits[0].key} runs first, but layer {self.plan.keys[0]} holds "
                f"{self.tower.first[0]}, which the first layer executed must hold; put a visit before the loop"
            )
        self.counts = {loop.number: counts.get(loop.number, loop.maximum) for loop in self.plan.loops}
        self.entries = tuple(self._entries(tape, visits))
        self.slot_owners = tuple(entry.index for entry in self.entries if entry.visit.writes)
        self.live.follow(visits)

    def _entries(self, tape: Sequence[Op], visits: Sequence[Visit]) -> Iterator[Entry]:
        """One entry a visit; operations before the first visit go with it, all others with the visit before them.

        Where a class adds to the stream between layers, what begins there (a group, a node with parameters of its
        own) begins with the visit after it, so that it sees what was added.
        """
        ops = [op for op in tape if not isinstance(op, Turn)]
        first = next(index for index, op in enumerate(ops) if isinstance(op, Run))
        before, after = list[list[Op]](), list[list[Op]]()
        opening: list[Op] = list(ops[:first])
        for op in ops[first:]:
            if isinstance(op, Run):
                before.append(opening)
                after.append([])
                opening = []
            elif opening or (self.tower.joins and isinstance(op, Fork | Enter)):
                opening.append(op)
            else:
                after[-1].append(op)
        after[-1] += opening
        children = {key: str(index) for index, key in enumerate(self.plan.keys)}
        written = sorted({visit.slot for visit in visits if visit.slot is not None})
        rank = {slot: index for index, slot in enumerate(written)}
        shared = {visit.slot for visit in visits if visit.slot is not None and not visit.writes}
        for index, visit in enumerate(visits):
            yield Entry(
                self,
                index,
                visit,
                children[visit.key],
                None if visit.slot is None or not self.tower.caches else rank[visit.slot],
                visit.slot in shared,
                tuple(before[index]),
                tuple(after[index]),
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int | slice) -> Any:
        return list(self.entries[index]) if isinstance(index, slice) else self.entries[index]

    def __repr__(self) -> str:
        return f"VisitList({len(self.entries)} visits of {len(self.plan.keys)} layers)"

    def begin(self, cache: Cache | None) -> None:
        """Opens a pass; a fresh cache is brought to one layer a slot, a cache of other loop counts is refused."""
        self.state = Pass()
        if cache is None or not self.tower.caches:
            return
        if len(cache) != len(self.entries) or len(self.slot_owners) != len(self.entries) or self.counts:
            made = getattr(cache, "deepen_counts", None)
            if made is None:
                keep_slots(cache, len(self.entries), self.slot_owners, self.live.cache_layers)
                cache.deepen_counts = dict(self.counts)  # pyright: ignore[reportAttributeAccessIssue]
            elif made != self.counts:
                raise DeepenError(
                    f"the loop counts changed from {made} to {self.counts} in the middle of a generation; the cache "
                    "holds no keys for the new turns. Set counts between generations"
                )


class Entry:
    """One visit, called in place of a layer."""

    def __init__(
        self,
        owner: VisitList,
        index: int,
        visit: Visit,
        child: str,
        slot: int | None,
        shared: bool,
        before: tuple[Op, ...],
        after: tuple[Op, ...],
    ) -> None:
        self.owner, self.index, self.visit, self.child = owner, index, visit, child
        self.slot, self.shared, self.before, self.after = slot, shared, before, after
        parts = owner.tower.parts
        missing = "".join(letter for letter in parts.letters if letter not in visit.parts)
        replaced = absent(self.layer, parts, missing)
        if visit.lora is not None:
            sets = owner.sets[visit.lora.name]
            for path in part_maps(self.layer, parts, visit.parts):
                lora = sets.get_submodule(label(path))
                assert isinstance(lora, Lora)
                replaced[path] = adapted(self.layer, path, lora)
        self.own = seen_with(self.layer, replaced) if replaced else None

    def __repr__(self) -> str:
        return f"visit {self.index} of layer {self.visit.key}"

    @property
    def layer(self) -> nn.Module:
        return self.owner._modules[self.child]  # pyright: ignore[reportReturnType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "owner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        if self.index == 0:
            owner.begin(given_cache(args, kwargs))
        if self.before:
            args, kwargs = map_stream(args, kwargs, lambda stream: self._operate(self.before, stream))
        if owner.tower.caches:
            args, kwargs = self._own_slot(args, kwargs)
        out = (self.own or self.layer)(*args, **kwargs)
        if not self.after:
            return out
        if isinstance(out, (tuple, list)):
            return type(out)((self._operate(self.after, out[0]), *out[1:]))
        return self._operate(self.after, out)

    def _own_slot(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shared = self.owner.state.shared if self.shared else None
        slot = self.slot
        if shared is not None:
            layer = self.layer
            if getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled():
                raise DeepenError("kv=first needs the keys of an earlier turn, which gradient checkpointing drops; "
                                  "turn gradient checkpointing off")  # fmt: skip
            if given_cache(args, kwargs) is None:
                return _with_cache(layer, args, kwargs, view(None, slot or 0, shared, not self.visit.writes))
        if slot is None:
            return args, kwargs
        reads = not self.visit.writes
        replace = lambda value: view(value, slot, shared, reads) if isinstance(value, Cache) else value  # noqa: E731
        return tuple(map(replace, args)), {
            name: replace(value) if name in CACHE_NAMES else value for name, value in kwargs.items()
        }

    def _operate(self, ops: Sequence[Op], stream: torch.Tensor) -> torch.Tensor:
        return operate(ops, stream, self.owner.state.forks, self.owner.marks, self.owner.sets)


def operate(
    ops: Sequence[Op],
    stream: torch.Tensor,
    forks: list[Forked],
    marks: dict[str, torch.Tensor],
    sets: Mapping[str, nn.Module] = {},
) -> torch.Tensor:
    """The stream after the operations of a tape that stand between two visits; open forks and marks are updated."""
    for op in ops:
        if isinstance(op, Fork):
            forks.append((stream, []))
        elif isinstance(op, Back):
            entry, branches = forks[-1]
            branches.append(stream)
            stream = entry
        elif isinstance(op, Join):
            entry, branches = forks.pop()
            updates = [branch - entry for branch in (*branches, stream)]
            total = sum(updates[1:], updates[0])
            stream = entry + (total / len(updates) if op.comb == "mean" else total)
        elif isinstance(op, Blend):
            entry, _ = forks.pop()
            stream = entry + op.scale * (stream - entry)
        elif isinstance(op, Gate):
            entry, _ = forks.pop()
            stream = entry + sets[op.own.name](entry) * (stream - entry)
        elif isinstance(op, Enter):
            stream = _entered(op.own, stream, marks, sets)
        elif isinstance(op, Record):
            marks[op.name] = stream
    return stream


def _entered(
    own: Own, stream: torch.Tensor, marks: Mapping[str, torch.Tensor], sets: Mapping[str, nn.Module]
) -> torch.Tensor:
    if own.kind != "inject":
        return sets[own.name](stream)
    assert isinstance(own.value, tuple)
    label, how = own.value
    return stream + marks[label] if how == "add" else sets[own.name](torch.cat((stream, marks[label]), -1))


def given_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    for name in CACHE_NAMES:
        if isinstance(value := kwargs.get(name), Cache):
            return value
    return next((value for value in args if isinstance(value, Cache)), None)


def _with_cache(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with `cache` where the layer takes its cache, which the model left empty."""
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    name = next(name for name in CACHE_NAMES if name in names)
    position = names.index(name)
    if position < len(args):
        return (*args[:position], cache, *args[position + 1 :]), kwargs
    return args, {**{key: value for key, value in kwargs.items() if key not in CACHE_NAMES}, name: cache}


def map_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with its stream (the first argument, or `hidden_states`) changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
