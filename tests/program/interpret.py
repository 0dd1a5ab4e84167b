"""The plainest executor: layers are functions on numbers, the tape is run as its docstring says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from deepen.program import Back, Blend, Enter, Fork, Gate, Join, Op, Program, Record, Run, Turn, Visit

Layer = Callable[[Visit, Fraction], Fraction]


def affine(visit: Visit, x: Fraction) -> Fraction:
    """Layer i as two parts, each x -> a x + b with its own numbers; a copy with `zero` parts is the identity."""
    for part in visit.parts:
        seed = 7 * visit.key.layer + (3 if part == "f" else 0)
        x = x * Fraction(seed % 5 + 2, 3) + seed % 11 - 4
    return x


def run(tape: Sequence[Op], x: Fraction, layer: Layer = affine) -> tuple[Fraction, dict[str, Fraction]]:
    """The stream after the tape, and what was recorded."""
    stack: list[tuple[Fraction, list[Fraction]]] = []
    records: dict[str, Fraction] = {}
    for op in tape:
        match op:
            case Run(visit):
                x = layer(visit, x)
            case Fork():
                stack.append((x, []))
            case Back():
                start, done = stack[-1]
                done.append(x)
                x = start
            case Join(comb):
                start, done = stack.pop()
                updates = [branch - start for branch in (*done, x)]
                x = start + sum(updates) / (len(updates) if comb == "mean" else 1)
            case Blend(scale):
                start, _ = stack.pop()
                x = start + Fraction(scale) * (x - start)
            case Record(name, _):
                records[name] = x
            case Gate():
                # a gate starts at 1, as if it were not there
                stack.pop()
            case Turn() | Enter():
                pass
    assert not stack
    return x, records


def value(text: str, x: int = 5, counts: Mapping[int, int] | None = None, depth: int = 12) -> Fraction:
    """The stream after a program, from x."""
    plan = Program.parse(text).plan(depth, ["af"] * depth)
    return run(plan.tape(counts), Fraction(x))[0]


def records(text: str, x: int = 5, counts: Mapping[int, int] | None = None, depth: int = 12) -> dict[str, Fraction]:
    """What a program records, from x."""
    plan = Program.parse(text).plan(depth, ["af"] * depth)
    return run(plan.tape(counts), Fraction(x))[1]
