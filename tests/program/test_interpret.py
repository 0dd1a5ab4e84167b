"""The laws of the language, run exactly: layers are affine maps on fractions."""

from fractions import Fraction
from random import Random

import pytest

from deepen.errors import ProgramError
from deepen.program import Back, Fork, Join, Program, Record, Run, Turn
from tests.program.interpret import affine, records, run, value
from tests.program.strategies import DEPTH, random_text

X = Fraction(5)


def tape(text: str, counts=None, depth: int = 12):
    return Program.parse(text).plan(depth, ["af"] * depth).tape(counts)


def layer(index: int, x: Fraction, parts: str = "af") -> Fraction:
    visit = next(v for v in Program.parse(f"{index}").plan(12, ["af"] * 12).visits)
    return affine(visit, x) if parts == "af" else value_of_part(index, x, parts)


def value_of_part(index: int, x: Fraction, part: str) -> Fraction:
    return affine(Program.parse(f"{index}.{part}").plan(12, ["af"] * 12).visits[0], x)


def test_a_sequence_is_the_composition_from_left_to_right():
    assert value("3 4") == layer(4, layer(3, X))
    assert value("3 4") != value("4 3")


@pytest.mark.parametrize("body", ["0", "0-3", "0-2 {3|4} 5", "(0 1)[scale=1/2]*2", "{0|{1|2}} 3.a"])
def test_unit_laws(body):
    plain = value(body)
    assert value(f"{{{body}}}") == plain
    assert value(f"{{{body}|_}}") == plain
    assert value(f"{{_|{body}|_}}") == plain
    assert value(f"({body})[scale=1]") == plain
    assert value(f"7 ({body})[scale=0]") == value("7")
    assert value(f"({body})*1") == plain
    assert value(f"7 ({body})*0") == value("7")
    assert value(f"({body})*2") == value(f"{body} {body}")
    assert value(f"({body})!") == plain
    assert value(f"({body})*!3") == value(f"({body})*3")
    assert value(f"_ {body} _") == plain


def test_a_group_adds_the_updates_of_its_branches():
    expected = X + (layer(3, X) - X) + (layer(4, X) - X)
    assert value("{3|4}") == expected == value("{4|3}")
    assert value("{3|4}[comb=sum]") == expected
    # the sum of the outputs would be another number
    assert expected != layer(3, X) + layer(4, X)


def test_a_group_with_comb_mean_averages_the_updates():
    expected = X + ((layer(3, X) - X) + (layer(4, X) - X) + 0) / 3
    assert value("{3|4|_}[comb=mean]") == expected
    assert value("{3|3}[comb=mean]") == layer(3, X)


def test_a_branch_may_be_a_sequence_a_loop_or_a_group():
    inner = X + (layer(1, X) - X) + (layer(2, X) - X)
    expected = X + (layer(4, layer(3, X)) - X) + (inner - X) + (layer(5, layer(5, X)) - X)
    assert value("{3 4|{1|2}|5*2}") == expected


def test_parts_compose_to_the_layer_and_parallel_parts_do_not():
    assert value("6.a 6.f") == value("6") != value("{6.a|6.f}")
    assert value("{6.a|6.f}") == X + (value_of_part(6, X, "a") - X) + (value_of_part(6, X, "f") - X)
    assert value("3 (4 5).a") == value("3 4.a 5.a")


def test_scale_damps_the_update_of_the_whole_body():
    assert value("(3 4)[scale=1/4]") == X + (layer(4, layer(3, X)) - X) / 4
    assert value("3-4[scale=1/4]") == value("3[scale=1/4] 4[scale=1/4]") != value("(3-4)[scale=1/4]")
    assert value("((3)[scale=1/2])[scale=1/2]") == value("3[scale=1/4]")


def test_a_list_of_scales_has_one_value_a_turn():
    def damped(x: Fraction, scale: Fraction) -> Fraction:
        return x + scale * (layer(4, layer(3, x)) - x)

    expected = damped(damped(damped(X, Fraction(1)), Fraction(1, 2)), Fraction(1, 4))
    assert value("(3-4)*3[scale=1:1/2:1/4]") == expected
    once = damped(damped(X, Fraction(1, 2)), Fraction(1, 2))
    assert value("(3-4)*2[scale=1/2]") == once == value("(3-4)[scale=1/2]*2")
    # outside the loop the body is the whole loop
    assert value("((3-4)*2)[scale=1/2]") == X + (value("(3-4)*2") - X) / 2 != once


def test_each_element_is_repeated_in_place():
    assert value("3-4**2") == value("3 3 4 4") != value("3-4*2")


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_count_chosen_at_run_time(count):
    assert value("2 (3 4)*0..5 6", counts={0: count}) == value(f"2 (3 4)*{count} 6")


def test_counts_are_chosen_by_loop_number():
    text = "(0 (1)*1..3 2)*1..4 (3)*2 (4)*0..2"
    assert value(text, counts={0: 2, 1: 3, 3: 1}) == value("(0 1*3 2)*2 3*2 4")
    assert value(text) == value("(0 1*3 2)*4 3*2 4*2")
    with pytest.raises(ProgramError, match=r"5 turns: loop 0, .* takes 1 to 4"):
        tape(text, {0: 5})
    with pytest.raises(ProgramError, match=r"0 turns: loop 1, `1\*1..3`, takes 1 to 3"):
        tape(text, {1: 0})
    with pytest.raises(ProgramError, match=r"1 turns: loop 2, `3\*2`, takes 2 to 2"):
        tape(text, {2: 1})
    for unknown in (4, -1):
        with pytest.raises(ProgramError, match="the program has 4"):
            tape(text, {unknown: 1})


def test_turns_are_announced_for_run_time_counts_only():
    ops = tape("(0)*2 (1)*1..3", {1: 2})
    assert [op for op in ops if isinstance(op, Turn)] == [Turn(1, 0), Turn(1, 1)]
    assert isinstance(ops[ops.index(Turn(1, 1)) + 1], Run)


def test_the_visits_of_a_tape_are_those_of_the_plan():
    plan = Program.parse("0 (1 2.f)*1..4 3").plan(4, ["af"] * 4)
    ran = [op.visit for op in plan.tape({0: 2}) if isinstance(op, Run)]
    assert [visit.index for visit in ran] == [0, 1, 2, 3, 4, 9]
    assert all(visit is plan.visits[visit.index] for visit in ran)
    assert [op.visit for op in plan.tape() if isinstance(op, Run)] == list(plan.visits)


def test_the_tape_of_a_group_is_one_entry_a_visit():
    zero, one, two = Program.parse("{0 1|2}").plan(3, ["af"] * 3).visits
    assert tape("{0 1|2}", depth=3) == (Fork(), Run(zero), Run(one), Back(), Run(two), Join("sum"))
    # a group of one branch is simplified away
    assert tape("{0}", depth=1) == tape("0", depth=1)
    assert tape("{0}[comb=mean]", depth=1) == tape("0", depth=1)


def test_marks_record_the_stream():
    assert records("0 @e 1 ?x 2") == {"e": value("0"), "x": value("0-1")}
    looped = records("(0 ?x @e)*3 1 ?main")
    assert looped == {f"x.{t}": value(f"0*{t + 1}") for t in range(3)} | {"e": value("0*3"), "main": value("0*3 1")}
    assert records("(0 ?x)*1..3", counts={0: 2}) == {"x.0": value("0"), "x.1": value("0*2")}
    assert set(records("((0 ?x)*2)*2")) == {"x.0.0", "x.0.1", "x.1.0", "x.1.1"}
    flags = [(op.name, op.exit) for op in tape("0 @e ?x") if isinstance(op, Record)]
    assert flags == [("e", False), ("x", True)]
    # a label inside a branch sees the branch, not the join
    assert records("{0 @e|1}") == {"e": value("0")}


@pytest.mark.parametrize("block", range(4))
def test_random_programs_equal_their_normal_form(block):
    tried = 0
    for seed in range(block * 250, block * 250 + 250):
        text = random_text(Random(f"run {seed}"))
        try:
            plan = Program.parse(text).plan(DEPTH, ["af"] * DEPTH)
        except ProgramError:
            continue
        if len(plan.visits) > 60:
            continue
        tried += 1
        twin = Program.parse(str(Program.parse(text))).plan(DEPTH, ["af"] * DEPTH)
        lowest = {loop.number: loop.minimum for loop in plan.loops}
        for counts in ({}, lowest):
            assert run(plan.tape(counts), X) == run(twin.tape(counts), X), text
    assert tried > 150
