"""What a wiring can carry of a program: the one table behind the refusals and the documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from deepen.errors import ProgramError
from deepen.program import Blend, Enter, Gate, Join, Plan
from deepen.wiring.base import FEATURES, Wiring

# What no stack executes, whatever its wiring.
UNBUILT = ("res", "topo", "down", "cap", "route", "p", "when", "solve")


class Wanted(NamedTuple):
    """A feature that a program uses, and the column where it does so, None where that is no single place."""

    feature: str
    column: int | None


def wanted(plan: Plan) -> Iterator[Wanted]:
    """What a program asks of its wiring."""
    columns = {use.name: use.column for use in plan.uses}
    if len({visit.key for visit in plan.visits}) < len(plan.visits):
        yield Wanted("loop", None)
    for loop in plan.loops:
        if loop.minimum != loop.maximum:
            yield Wanted("n..m", loop.column)
    ops = plan.tape()
    if any(isinstance(op, Join) for op in ops):
        yield Wanted("group", next((index + 1 for index, sign in enumerate(plan.text) if sign == "{"), None))
    if any(isinstance(op, Blend) for op in ops):
        yield Wanted("scale", columns.get("scale"))
    if any(isinstance(op, Gate) for op in ops):
        yield Wanted("gate", columns.get("gate"))
    for op in ops:
        if isinstance(op, Enter):
            yield Wanted("inject" if op.own.kind == "inject" else "entry", columns.get(op.own.kind))
    if any(visit.lora for visit in plan.visits):
        yield Wanted("lora", columns.get("lora"))
    if "kv" in columns:
        yield Wanted("kv", columns["kv"])


def require(plan: Plan, name: str, wiring: type[Wiring]) -> None:
    """Refuses a program that a stack, or this wiring, cannot carry.

    Raises:
        ProgramError: names the attribute or the wiring, with the reason and the column.
    """
    for use in plan.uses:
        if use.name in UNBUILT:
            raise ProgramError(f"a stack does not execute {use.name!r}", plan.text, use.column)
        if use.name == "kv" and use.value == "mean":
            raise ProgramError("a stack does not execute kv=mean; use kv=first or kv=last", plan.text, use.column)
        if use.name == "comb" and use.value == "gate":
            raise ProgramError("a stack does not execute comb=gate; use sum or mean", plan.text, use.column)
        if use.where == "mark" and use.name in ("conf", "head", "norm") and use.value not in ("shared", float("inf")):
            raise ProgramError(f"a stack does not execute {use.name!r} of an exit", plan.text, use.column)
    for feature, column in wanted(plan):
        if reason := wiring.refuses.get(feature):
            raise ProgramError(f"the wiring {name} cannot carry {FEATURES[feature]}: {reason}", plan.text, column)
