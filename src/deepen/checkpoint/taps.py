"""Streams that leave one tower on the way and join another (deepstack), and the programs in which they have no place.

    vision   0 -> 1 -> 2 -> 3 -> merger            taps: after layers 1 and 2, each with a merger of its own
                  |    |
    text     0 ---+ 1 -+ 2 -> 3                    joins: after the first visit, after the second, whatever they run

A tap follows its layer and keeps its merger; of a layer visited several times the last visit counts. What was tapped
joins in the order of execution, one stream after each of the first visits, by place: that is what the class does, so a
plain checkpoint means the same. Inside a group, a scale or a divided layer there is no such place, and it is refused.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from deepen.checkpoint.depth_fields import moved_features
from deepen.checkpoint.family import Tower
from deepen.errors import FamilyError
from deepen.program import Blend, Fork, Gate, Join, Plan, Run

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


def refuse_taps(ck: Checkpoint, tower: Tower) -> None:
    """Refuses a program that leaves out a layer whose stream is read, or taps or joins one where it is divided.

    Raises:
        FamilyError: the visit, what is read or added there, and what to do.
    """
    if tower.name in ck.family.features.values() or tower.name in ck.family.taps.values():
        origins = [ck.banks[tower.name][visit.key.layer] for visit in ck.plan(tower.name).visits]
        moved_features(ck.skeleton.config, ck.family, tower, ck.skeleton.depth(tower), origins, ck.where)
    fields = [field for field, fed in ck.family.taps.items() if fed == tower.name]
    plan = ck.plan(tower.name)
    if tower.crosses:
        _refuse_crosses(ck, tower, plan)
    if not fields and not tower.joins:
        return
    alone = _alone(plan)
    for field in fields:
        for layer in attrgetter(field)(ck.skeleton.config):
            visits = [visit for visit in plan.visits if ck.banks[tower.name][visit.key.layer] == layer]
            if visits and visits[-1].index not in alone:
                raise FamilyError(
                    f"{ck.where}: {field} reads the stream after layer {layer}, whose last visit is inside a group or "
                    "a scale; move it out"
                )
    if tower.joins:
        _refuse_joins(ck, tower, plan, alone)


def _refuse_joins(ck: Checkpoint, tower: Tower, plan: Plan, alone: set[int]) -> None:
    count = len(attrgetter(tower.joins)(ck.skeleton.config))
    optional = {loop.number for loop in plan.loops if loop.minimum != loop.maximum}
    what = f"{tower.joins} has {count} entries, and one stream is added after each of the first {count} visits"
    if len(plan.visits) < count:
        raise FamilyError(f"{ck.where}: {what}; the {tower.name} program has {len(plan.visits)}. Add visits")
    for visit in plan.visits[:count]:
        whole = len(visit.parts) == len(tower.parts.letters) and plan.inits.get(visit.key) != "zero"
        if not whole or visit.index not in alone or optional.intersection(visit.loops):
            raise FamilyError(
                f"{ck.where}: {what}; visit {visit.index} ({visit.key}) is a part, a zero copy, or inside a group, a "
                "scale or a loop of variable length. Put a whole layer there"
            )


def _refuse_crosses(ck: Checkpoint, tower: Tower, plan: Plan) -> None:
    crossing = attrgetter(tower.crosses)(ck.skeleton.config)
    optional = {loop.number for loop in plan.loops if loop.minimum == 0}
    certain = next((visit.index for visit in plan.visits if not optional.intersection(visit.loops)), len(plan.visits))
    for visit in plan.visits:
        if ck.banks[tower.name][visit.key.layer] not in crossing:
            continue
        what = f"{ck.where}: visit {visit.index} runs layer {visit.key}, one of {tower.crosses}"
        if visit.index <= certain:
            raise FamilyError(
                f"{what}, and may come first, where the class counts tokens; put a layer that attends to the text first"
            )
        if visit.slot != visit.index:
            raise FamilyError(
                f"{what}, whose cache entry the class looks up by the number of the visit; a part without a mixer or "
                "kv=first before it would shift the entries"
            )


def _alone(plan: Plan) -> set[int]:
    """The visits outside groups and scales, which alone see the whole stream."""
    found, open_forks = set[int](), 0
    for op in plan.tape():
        if isinstance(op, Fork):
            open_forks += 1
        elif isinstance(op, (Join, Blend, Gate)):
            open_forks -= 1
        elif isinstance(op, Run) and not open_forks:
            found.add(op.visit.index)
    return found
