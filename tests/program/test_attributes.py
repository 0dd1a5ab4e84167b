from fractions import Fraction

import pytest

from deepen.errors import ProgramError
from deepen.program import ATTRIBUTES, MARK_ATTRIBUTES, Attribute, Program, register
from deepen.program.attributes import number, show


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("0[scale=1/2]", "scale", (Fraction(1, 2),)),
        ("0[scale=.25]", "scale", (Fraction(1, 4),)),
        ("0*2[scale=2:1.5]", "scale", (Fraction(2), Fraction(3, 2))),
        ("0[lora=8]", "lora", 8),
        ("0*2[kv=cyc:3]", "kv", ("cyc", 3)),
        ("0[kv=shared]", "kv", "shared"),
        ("0[emb]", "emb", True),
        ("@e 0[inject=e:concat]", "inject", ("e", "concat")),
        ("@e 0[inject=e]", "inject", ("e", "add")),
        ("@e 0[topo=anchor:e,res=1/2]", "topo", ("anchor", "e")),
        ("0[topo=replace,res=1]", "topo", ("replace",)),
        ("0*1..2[draw=poisson:3.5]", "draw", ("poisson", Fraction(7, 2))),
        ("0*1..2[draw=uniform]", "draw", ("uniform",)),
        ("(0 1)[solve=hcn:3]", "solve", ("hcn", 3)),
        ("(0 1)[solve=gs]", "solve", ("gs",)),
        ("0 ?x[conf=inf]", "conf", float("inf")),
        ("0 ?x[norm=own]", "norm", "own"),
    ],
)
def test_values_are_parsed_and_printed_without_loss(text, name, value):
    program = Program.parse(text)
    for twin in (program, Program.parse(str(program))):
        uses = {use.name: use.value for use in twin.plan(2, ["af"] * 2).uses}
        assert uses[name] == value


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1/0", "1.", "٣", "1/2/3", "inf", "1" * 20])
def test_what_is_not_a_number(text):
    with pytest.raises(ValueError, match="a number such as"):
        number(text)


def test_show():
    assert show((Fraction(1, 2), 3, "x")) == "1/2:3:x"


def test_the_table_is_consistent():
    for name, row in ATTRIBUTES.items():
        assert row.name == name
        assert row.needs is None or row.needs in ATTRIBUTES
        assert "mark" not in row.places
    assert set(MARK_ATTRIBUTES) == {"conf", "loss", "head", "norm"}
    # the identity value of an attribute is one that its own reader gives
    for name in ("scale", "res", "cap"):
        assert ATTRIBUTES[name].read("1") == ATTRIBUTES[name].identity == (1,)


def test_third_parties_add_attributes():
    with pytest.raises(ProgramError, match="unknown attribute 'temper'"):
        Program.parse("0[temper=3]")
    try:
        register(Attribute("temper", frozenset({"node"}), lambda text: int(text or "1"), default=1, identity=1))
        program = Program.parse("(0 1)[temper=3] {0|1}[temper]")
        assert str(program) == "(0-1)[temper=3] {0|1}[temper=1]"
        assert [use.value for use in program.plan(2, ["af"] * 2).uses] == [3, 1]
        with pytest.raises(ProgramError, match="temper takes invalid literal"):
            Program.parse("0[temper=x]")
        with pytest.raises(ProgramError, match="'temper' stands on a layer"):
            Program.parse("0*2[temper=2]")
        with pytest.raises(ValueError, match="registered already"):
            register(Attribute("temper", frozenset({"node"}), int))
    finally:
        ATTRIBUTES.pop("temper", None)


def test_a_row_with_impossible_places_is_refused():
    with pytest.raises(ValueError, match="places are visit, node"):
        register(Attribute("odd", frozenset({"layer"}), lambda text: text))
    with pytest.raises(ValueError, match="places are"):
        register(Attribute("odd", frozenset(), lambda text: text))
    with pytest.raises(ValueError, match="stands on marks only"):
        register(Attribute("odd", frozenset({"mark", "node"}), lambda text: text))
