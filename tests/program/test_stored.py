import pytest

from deepen.program import Program
from deepen.program.stored import stored_text


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("0 2-3", "0-2"),
        ("3*0 1", "0"),
        ("(0 2)*3[kv=first]", "(0-1)*3[kv=first]"),
        ("3 0! 0 3!b {2|3!b}", "0-3 {4|3}"),
        ("(0-1)*!2[scale=1:1/2] 1!b", "(0-1)[scale=1] (2-3)[scale=1/2] 4"),
        ("(0 (1*!2)*0 1*2)*!2", "0 1*2 2 3*2"),
    ],
)
def test_the_stored_text_names_the_layers_by_first_use(text, stored):
    plan = Program.parse(text).plan(4, ["af"] * 4)
    assert stored_text(plan) == stored
    again = Program.parse(stored).plan(len(plan.keys), ["af"] * len(plan.keys))
    number = {key: index for index, key in enumerate(plan.keys)}
    assert [visit.key.layer for visit in again.visits] == [number[visit.key] for visit in plan.visits]
    assert [visit.slot for visit in again.visits] == [visit.slot for visit in plan.visits]
