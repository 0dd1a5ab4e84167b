"""The text of a plan over its stored bank: layers numbered by first use, copies grown into layers of their own."""

from __future__ import annotations

from dataclasses import replace

from deepen.errors import ProgramError
from deepen.program.format import format_node
from deepen.program.plan import Plan
from deepen.program.program import Program
from deepen.program.tree import Attr, Index, Loop, Node, Ref, Scope, Seq, rebuild


def stored_text(plan: Plan) -> str:
    """The program to store beside a bank that holds `plan.keys` in that order; it contains no `!`.

    A loop whose turns are copies is written out, since its turns now name different layers.

    Raises:
        ProgramError: such a loop shares cache slots between its turns, which text cannot say of different layers.

    """
    number = {key: index for index, key in enumerate(plan.keys)}
    keys = {(visit.leaf, visit.turn): visit.key for visit in plan.visits}

    def rename(node: Node, turn: tuple[int, ...]) -> Node:
        match node:
            case Ref():
                index = Index(number[keys[node.leaf, turn]])
                return replace(node, first=index, last=None, stride=1, copy=None)
            case Loop(high=0):
                # a body that never runs has no keys
                return Seq()
            case Loop(fresh=True, body=body):
                if any(attr.name == "kv" for attr in node.attrs):
                    reason = "kv on a loop of copies cannot be stored: its turns become different layers"
                    raise ProgramError(reason, plan.text, node.column)
                return Seq(tuple(_turn(rename(body, (*turn, count)), node, count) for count in range(node.high)))
            case Loop(body=body):
                return replace(node, body=rename(body, (*turn, 0)))
            case _:
                return rebuild(node, lambda child: rename(child, turn))

    return str(Program.parse(format_node(rename(plan.root, ()))))


def _turn(body: Node, loop: Loop, count: int) -> Node:
    """One turn of a written-out loop, with the value of each per-turn attribute."""
    attrs = tuple(
        Attr(attr.name, (attr.value[count],), attr.column)
        if isinstance(attr.value, tuple) and len(attr.value) == loop.high > 1 and attr.name in ("scale", "res", "cap")
        else attr
        for attr in loop.attrs
    )
    return Scope(Seq((body,)), attrs) if attrs else body
