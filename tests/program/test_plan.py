import copy

import pytest

from deepen.errors import ProgramError
from deepen.program import Key, Plan, Program, Ref, Use
from deepen.program.tree import walk


def plan(text: str, depth: int = 12, parts: str = "af") -> Plan:
    return Program.parse(text).plan(depth, [parts] * depth)


def slots(text: str, depth: int = 12) -> str:
    """Each visit as its slot, `-` without one, `r` behind a slot that is only read."""
    visits = plan(text, depth).visits
    return " ".join("-" if v.slot is None else f"{v.slot}{'' if v.writes else 'r'}" for v in visits)


def test_a_visit_says_what_runs_where():
    made = plan("0 (1[lora=4] (2-3.f)*2)*!2")
    assert [visit.index for visit in made.visits] == list(range(11))
    last = made.visits[-1]
    assert (last.key, last.parts, last.leaf, last.turn, last.loops) == (Key(3, "1"), "f", 3, (1, 1), (0, 1))
    assert (last.slot, last.writes, last.attrs) == (None, False, {})
    first = made.visits[1]
    assert (first.key, first.parts, first.leaf, first.turn, first.loops) == (Key(1), "af", 1, (0,), (0,))
    assert (first.slot, first.writes, first.attrs) == (1, True, {"lora": 4})


def test_keys_are_in_order_of_first_use_and_copies_are_numbered_by_it():
    made = plan("3! 1 (3 1)*2 0!b 3!zero 3!c=rand 3!c")
    assert [str(key) for key in made.keys] == ["3!1", "1", "3", "0!b", "3!2", "3!c"]
    assert made.inits == {Key(3, "1"): "copy", Key(0, "b"): "copy", Key(3, "2"): "zero", Key(3, "c"): "rand"}


def test_the_initial_value_of_a_label_may_stand_at_any_of_its_places():
    for text in ("3!b=zero 3!b", "3!b 3!b=zero", "3!b=zero 3!b=zero"):
        assert plan(text).inits == {Key(3, "b"): "zero"}
    assert plan("3!b=zero 2!b=rand").inits == {Key(3, "b"): "zero", Key(2, "b"): "rand"}
    with pytest.raises(ProgramError, match="the copy 11!b has two initial values"):
        plan("^1!b=zero 11!b=rand")


def test_copies_of_turns_take_the_initial_value_of_the_text():
    assert plan("(3!zero 4)*!2").inits == {Key(3, "1"): "zero", Key(3, "2"): "zero", Key(4, "1"): "copy"}


def test_solar_has_48_keys_with_copies_and_32_without():
    assert len(plan("0-23 (8-31)!", 32).keys) == len(plan("0-23 (8-31)!", 32).visits) == 48
    assert (len(plan("0-23 8-31", 32).keys), len(plan("0-23 8-31", 32).visits)) == (32, 48)
    assert plan("0-23 8-31", 32).slots == 48


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-2", "0 1 2"),
        ("(0-1)*2", "0 1 2 3"),
        ("0 0", "0 1"),
        ("0.f 1 2.a", "- 0 1"),
        ("{0|1.f}", "0 -"),
        ("0! 0", "0 1"),
        ("0 (1-2)*2[kv=own] 3", "0 1 2 3 4 5"),
        ("0 (1-2)*3[kv=first] 3", "0 1 2 1r 2r 1r 2r 3"),
        ("0 (1-2)[kv=first]*3 3", "0 1 2 1r 2r 1r 2r 3"),
        ("(0 1[kv=first])*2", "0 1 2 1r"),
        ("(0 1.f)*2[kv=first]", "0 - 0r -"),
        ("0*!3[kv=first]", "0 0r 0r"),
        # attached to the outer loop: each inner turn has a slot of its own, written in outer turn 0
        ("(0*2)*2[kv=first]", "0 1 0r 1r"),
        # attached to the inner loop: the outer turns have slots of their own
        ("(0*2[kv=first])*2", "0 0r 1 1r"),
        # on a visit or a group, the innermost loop
        ("(0[kv=first]*2)*2", "0 0r 1 1r"),
        ("((0*2)[kv=first])*2", "0 0r 1 1r"),
        ("(0*2 1)[kv=first]*2", "0 0r 1 2 2r 1r"),
        # the nearest rule holds
        ("(0[kv=own] 1)*2[kv=first]", "0 1 2 1r"),
        ("(0*2[kv=own] 1)*2[kv=first]", "0 1 2 3 4 2r"),
        ("(0 1)*2[kv=last]", "0 1 0 1"),
        ("(0 1)*2[kv=mean]", "0 1 0 1"),
        ("(0)*5[kv=cyc:2]", "0 1 0 1 0"),
        ("(0)*3[kv=cyc:5]", "0 1 2"),
        ("(0)*3[kv=cyc:1]", "0 0 0"),
        ("((0)*2[kv=first] 1)[kv=own]", "0 0r 1"),
        ("0-1 (2-3)*2[kv=none] 4", "0 1 - - - - 2"),
        ("0[kv=top] 1 2[kv=top] 3[kv=low] 4[kv=low] 5[kv=top]", "0 1 0r 2 2r 0r"),
        ("(0[kv=top])*2", "0 0r"),
        ("(0 1)*0 2", "0"),
        ("0*0..3 1", "0 1 2 3"),
    ],
)
def test_cache_slots(text, expected):
    assert slots(text) == expected
    assert plan(text).slots == len({part.rstrip("r") for part in expected.split()} - {"-"})


def test_slot_counts_of_the_examples():
    assert plan("0-3 (4-7)*3 8-11").slots == 20
    assert plan("0-3 (4-7)*3[kv=first] 8-11").slots == 12
    assert plan("(0-11)*2").slots == 24
    assert plan("0-11 (8-11)*2[when=decode,kv=none]").slots == 12


def test_a_slot_is_written_before_it_is_read():
    for text in ("(0 (1)*2)*3[kv=first]", "0[kv=x] (1[kv=x] 2)*2", "(0*2[kv=first] 1)*!2[kv=first]"):
        written: set[int | None] = set()
        for visit in plan(text).visits:
            assert visit.writes or visit.slot in written
            written |= {visit.slot} if visit.writes else set()


def test_parts_come_from_the_bank_and_a_missing_one_is_refused():
    made = Program.parse("0 1 2.f").plan(3, ["a", "acf", "f"])
    assert [visit.parts for visit in made.visits] == ["a", "acf", "f"]
    assert [visit.slot for visit in made.visits] == [0, 1, None]
    assert Program.parse("0.c").plan(1, ["acf"]).visits[0].parts == "c"
    with pytest.raises(ProgramError, match=r"layer 1 has no part f of its own \(its parts: a\)") as error:
        Program.parse("0 1.f").plan(2, ["af", "a"])
    assert error.value.column == 3
    with pytest.raises(ValueError, match="2 sets of parts for 3 layers"):
        Program.parse("0").plan(3, ["af", "af"])


def test_loops_are_numbered_in_text_order():
    made = plan("(0 (1)*2)*1..3 2*!2[kv=own]")
    assert [(x.number, x.minimum, x.maximum, x.fresh, x.text, x.column) for x in made.loops] == [
        (0, 1, 3, False, "(0 1*2)*1..3", 10),
        (1, 2, 2, False, "1*2", 7),
        (2, 2, 2, True, "2*!2[kv=own]", 17),
    ]
    assert {visit.loops for visit in made.visits} == {(0,), (0, 1), (2,)}
    assert all(len(visit.loops) == len(visit.turn) for visit in made.visits)


def test_leaves_are_numbered_over_the_layers_of_the_text_written_out():
    made = plan("0-1 (2**2 _ 3.a.f)*2 {4|5*0} ^1")
    assert [visit.leaf for visit in made.visits] == [0, 1, 2, 2, 2, 2, 3, 5]
    leaves = [node for node in walk(made.root) if isinstance(node, Ref)]
    assert [leaf.leaf for leaf in leaves] == list(range(6))
    assert all(leaf.last is None and not leaf.first.from_end for leaf in leaves)


def test_marks_in_execution_order():
    made = plan("0 ?a (1 @e ?b)*2 ((2 ?c)*2)*1..2 ?main")
    assert made.marks == ("a", "e", "b.0", "b.1", "c.0.0", "c.0.1", "c.1.0", "c.1.1", "main")


def test_every_attribute_is_listed_with_its_place_and_column():
    made = plan("@e 0-1[lora=4] (2)[inject=e] {3|4}[comb=mean]*2[emb] 5 ?x[conf=0.5]")
    assert [(use.name, use.where, use.column) for use in made.uses] == [
        ("lora", "visit", 8),
        ("inject", "node", 20),
        ("emb", "loop", 49),
        ("comb", "group", 36),
        ("conf", "mark", 59),
    ]
    assert made.uses[0] == Use("lora", 4, "visit", 8)
    assert plan("0-11").uses == ()


def test_warnings():
    assert plan("0-11").warnings == plan("0-3 (4-7)*2 8-11").warnings == ()
    assert plan("0-10").warnings == ("the last layer of the model, 11, is never visited",)
    assert plan("(0-11).f").warnings == ("no visit mixes tokens: the program has no attention",)
    assert plan("1 0 2-11").warnings == ("the layers are first visited in another order than they were trained in",)
    assert plan("0-10 11*2[kv=last]").warnings == (
        "kv=last is for evaluation: in training, cached and uncached runs differ",
    )


def test_a_plan_can_be_copied_compared_and_hashed():
    made = plan("0-3! (4)*2[kv=first,emb]")
    twin = copy.deepcopy(made)
    assert twin == made
    assert hash(twin) == hash(made)
    assert len({*made.visits, *twin.visits}) == len(made.visits)


def test_a_long_program_is_planned_in_reasonable_time():
    made = plan("(((0-7)*8)*8)*8", 8)
    assert (len(made.visits), made.slots, len(made.tape())) == (4096, 4096, 4096)
