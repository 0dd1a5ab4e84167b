from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from deepen.errors import ProgramError
from deepen.program import Ends, LayerCost, Program, cost
from tests.program.strategies import DEPTH, random_text, texts

D = 4
LAYER = LayerCost(
    params={"a": 4 * D * D, "f": 8 * D * D},
    flops={"a": 8.0 * D * D, "f": 16.0 * D * D},
    flops_per_key=4.0 * D,
    cache=lambda context: 16 * context,
    kv_flops=4.0 * D * D,
    linears={"a": [(D, D)] * 4, "f": [(D, 4 * D), (4 * D, D)]},
    width=D,
)
PARTS = ["af"] * DEPTH


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0 1 2 3", "0-3"),
        ("3 2 1", "3-1"),
        ("0 1", "0-1"),
        ("0 1 2 1 0", "0-2 1-0"),
        ("0 0 1", "0 0-1"),
        ("0-10/2", "0 2 4 6 8 10"),
        ("10-5/5", "10 5"),
        ("4-4", "4"),
        ("^1-^1", "^1"),
        ("0 1-^1/2", "0 1-^1/2"),
        ("0-5 6 (7 (8))", "0-8"),
        ("4-7.a", "4.a 5.a 6.a 7.a"),
        ("0-^1.a", "0-^1.a"),
        ("0-^1[scale=1/2]", "0-^1[scale=1/2]"),
        ("(0-^1)[scale=1/2]", "(0-^1)[scale=1/2]"),
        ("0-^1*2", "(0-^1)*2"),
        ("0-^1**2", "0-^1**2"),
        ("0-^1**2**3[emb]*2", "(0-^1**2**3[emb])*2"),
        ("(0*2)[emb]", "(0*2)[emb]"),
        ("((0*2))[emb]", "(0*2)[emb]"),
        ("((0))*2[emb]", "0*2[emb]"),
        ("(0[emb])[scale=1/2]", "(0[emb])[scale=1/2]"),
        ("({0|1})*2", "{0|1}*2"),
        ("{0 1|(2)|}", "{0-1|2|_}"),
        ("{}*1 0", "{_}*1 0"),
        ("()*2 0", "_*2 0"),
        ("(@e)*2 0", "(@e)*2 0"),
        ("0**3", "0*3"),
        ("0*2..2", "0*2"),
        ("0 ?x[loss=.50,conf=0.9]", "0 ?x[conf=9/10,loss=1/2]"),
        ("0*1..32[grad=8,draw=lognormal:16:0.5]", "0*1..32[draw=lognormal:16:1/2,grad=8]"),
        ("@e 0[inject=e]", "@e 0[inject=e:add]"),
        ("3!b=zero 3!b", "3!b=zero 3!b"),
        ("3!copy.a", "3.a!"),
        ("0-3 # all\n; , 4", "0-4"),
    ],
)
def test_the_normal_form(text, normal):
    assert str(Program.parse(text)) == normal
    assert str(Program.parse(normal)) == normal


def refused(error: ProgramError, text: str) -> bool:
    """False; checks that the column lies in the text."""
    assert error.column is None or 1 <= error.column <= len(text) + 1
    return False


def same(text: str, priced: bool = True) -> bool:
    """Whether the text is a program; checks that it and its normal form are one and the same."""
    try:
        program = Program.parse(text)
    except ProgramError as error:
        return refused(error, text)
    normal = str(program)
    twin = Program.parse(normal)
    assert str(twin) == normal
    assert twin.towers == program.towers
    try:
        plan = program.plan(DEPTH, PARTS)
    except ProgramError:
        with pytest.raises(ProgramError):
            twin.plan(DEPTH, PARTS)
        return False
    other = twin.plan(DEPTH, PARTS)
    assert (plan.visits, plan.keys, plan.inits, plan.marks) == (other.visits, other.keys, other.inits, other.marks)
    assert plan.tape() == other.tape()
    if priced:
        assert cost(plan, [LAYER] * DEPTH, Ends(0, 0), 64) == cost(other, [LAYER] * DEPTH, Ends(0, 0), 64)
    assert len({visit.slot for visit in plan.visits} - {None}) == plan.slots
    return True


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 10))])
def test_ten_thousand_random_programs_keep_their_trace_and_cost(block):
    programs = sum(
        same(random_text(Random(seed)), priced=seed % 5 == 0) for seed in range(block * 1000, block * 1000 + 1000)
    )
    assert programs > 900


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(texts())
def test_the_same_law_under_hypothesis(text):
    same(text)


@pytest.mark.parametrize("block", range(4))
def test_a_damaged_text_is_a_program_or_a_program_error(block):
    for seed in range(block * 500, block * 500 + 500):
        dice = Random(f"damage {seed}")
        text = random_text(dice)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(text) + 1)
            text = text[:at] + dice.choice(["", *"(){}[]|*!.^-/_@?=:,;#0a9 \n"]) + text[at + dice.randint(0, 1) :]
        same(text)
