import pytest

from deepen.errors import ProgramError
from deepen.program import Program, transforms
from tests.program.interpret import value

T = transforms


def made(name: str, text: str, *args, depth: int = 12, **more) -> str:
    program, note = getattr(transforms, name)(Program.parse(text), *args, depth=depth, **more)
    assert note
    assert Program.parse(str(program)) == program
    program.plan(depth, ["af"] * depth)
    return str(program)


@pytest.mark.parametrize(
    ("name", "text", "args", "expected"),
    [
        ("prune", "0-11", ([6, 7, 8],), "0-5 9-11"),
        ("prune", "0-^1", ([10],), "0-9 11"),
        ("prune", "0-3 (4-7)*3 8-11", ([5],), "0-3 (4 6-7)*3 8-11"),
        ("prune", "0-3 (4-7)*3 8-11", ([4, 5, 6, 7],), "0-3 8-11"),
        ("prune", "0 4*2 (4)[emb] (4*2)[emb] 1", ([4],), "0-1"),
        ("prune", "0 {4|5} 6", ([4],), "0 5-6"),
        ("prune", "0 {4|5|6}[comb=mean] 7", ([4],), "0 {5|6}[comb=mean] 7"),
        ("prune", "0 {4|_} {5|6 7} 8", ([4, 6],), "0 {5|7} 8"),
        ("prune", "0 4.a 4! 5", ([4],), "0 5"),
        ("loop", "0-11", (4, 7, 3), "0-3 (4-7)*3 8-11"),
        ("loop", "0-11", (4, 4, "1..3"), "0-3 4*1..3 5-11"),
        ("loop", "0-3 (4-5)*2 6-11", (3, 6, 2), "0-2 (3 (4-5)*2 6)*2 7-11"),
        ("stack", "0-5", (2,), "(0-5)*!2"),
        ("stack", "0-2 {3|4}", (3,), "(0-2 {3|4})*!3"),
        ("interleave", "0-2", (2,), "0*!2 1*!2 2*!2"),
        ("interleave", "0 @e (1-2)*2", (2,), "0*!2 @e (1-2)*2*!2"),
        ("insert_zero", "0-11", (4,), "0-3 3!zero 4-7 7!zero 8-11 11!zero"),
        ("insert_zero", "0-2 @e 3-4", (2,), "0-1 1!zero 2 @e 3 3!zero 4"),
        ("upscale", "0-11", (4,), "0-7 4! 5! 6! 7! 8! 9! 10! 11!"),
        ("upscale", "0-3", (0,), "0-3 0! 1! 2! 3!"),
        ("fuse", "0-11", (8, 10), "0-7 {8.f|9.f|10.f} 11"),
        ("parallel", "0-11", (4, 7, 2), "0-3 {4|5} {6|7} 8-11"),
        ("parallel", "0-11", (4, 8, 3), "0-3 {4|5|6} {7|8} 9-11"),
        ("parallel", "0-11", (4, 6, 2), "0-3 {4|5} 6-11"),
        ("reverse", "0-11", (4, 7), "0-3 7-4 8-11"),
        ("reverse", "0-3 (4-5)*2 6", (3, 6), "0-2 6 (4-5)*2 3"),
        ("permute", "0-3", ([3, 1, 2, 0],), "3 1-2 0"),
        ("permute", "0.a 1", ([1, 0],), "1 0.a"),
        ("tie", "0-5", ([[0, 1], [2, 3, 5]],), "0 0 2 2 4 2"),
        ("tie", "(0-1)*2 {1|2.f}", ([[1, 2]],), "(0-1)*2 {1|1.f}"),
        ("untie", "0-3 (4-7)*3 8", (), "0-3 (4-7)*!3 8"),
        ("untie", "0-2 1-2", (), "0-2 1! 2!"),
        ("untie", "6.a 6.f 6.a", (), "6.a 6.f 6.a!"),
        ("untie", "(0 0)*2 3!b=zero 3!b", (), "(0 0!)*!2 3!zero 3!zero"),
        ("relax", "0 (1-3)*3 4", (8,), "0 (1-3)*3[lora=8] 4"),
        ("relax", "(0*2 1)*3[kv=first] 4*!2", (4,), "(0*2 1)*3[kv=first,lora=4] 4*!2"),
        ("exits", "0-11", ([3, 7],), "0-3 ?e3 4-7 ?e7 8-11"),
    ],
)
def test_transforms(name, text, args, expected):
    assert made(name, text, *args) == expected


def test_options():
    assert made("loop", "0-11", 4, 7, 3, attrs="kv=first") == "0-3 (4-7)*3[kv=first] 8-11"
    assert made("exits", "0-5", [2], attrs="conf=0.9") == "0-2 ?e2[conf=9/10] 3-5"
    program, _ = T.prune(Program.parse("text: 0-3 vision: 0-5"), [1], 6, tower="vision")
    assert str(program) == "text: 0-3 vision: 0 2-5"


def test_transforms_compose_on_the_current_text():
    program = Program.identity(12)
    program, _ = T.prune(program, [2, 3], 12)
    program, _ = T.loop(program, 1, 5, 2, 12)
    program, _ = T.exits(program, [0, 6], 12)
    program, _ = T.prune(program, [11], 12)
    assert str(program) == "0 ?e0 (1 4-5)*2 6 ?e6 7-10"


def test_the_note_says_what_was_done():
    program = Program.parse("0-3 (4 5)*2 6 5")
    assert T.prune(program, [5], 12)[1] == "dropped layers 5 at 2 places in the text"
    assert T.loop(program, 1, 3, "1..4", 12)[1] == "looped `1-3` 1..4 times"
    assert T.upscale(Program.identity(12), 4, 12)[1] == "upscaled 12 visits to 16, 8 of them copies"
    assert T.tie(program, [[0, 1]], 12)[1] == "tied 2 layers to 1: 1 to 0"


def test_the_program_given_stays_as_it_is():
    program = Program.parse("0-3")
    T.stack(program, 2, 12)
    assert str(program) == "0-3"


def test_functions_that_are_kept():
    for text in ("0-3 (4-7)*3 8-11", "0-2 1-2", "(0 0)*2 3*3", "{0|1 0}*2"):
        program, _ = T.untie(Program.parse(text), 12)
        plan = program.plan(12, ["af"] * 12)
        # a copy computes what its layer does until it is trained
        assert value(str(program)) == value(text)
        assert len(plan.keys) == len(plan.visits)


@pytest.mark.parametrize(
    ("name", "text", "args", "reason"),
    [
        ("prune", "0-3", ([7, 5],), "does not visit layer 5, 7"),
        ("prune", "0-3", ([0, 1, 2, 3],), "a program visits at least one layer"),
        ("loop", "0-3 (4-7)*2 8", (4, 8, 2), r"layer 4 stands inside `\(4-7\)\*2`"),
        ("loop", "0-3 1", (1, 3, 2), "layer 1 is visited at 2 places"),
        ("loop", "0-3", (3, 1, 2), "layer 3 is visited after layer 1"),
        ("loop", "0-3", (0, 9, 2), "does not visit layer 9"),
        ("loop", "0-3", (0, 1, "3..1"), "the range 3..1 is empty"),
        ("stack", "0!b", (2,), "has a label and cannot be copied again"),
        ("insert_zero", "0-3", (0,), "after every 0 visits"),
        ("insert_zero", "(0-3)*2", (2,), "insert_zero needs a plain list of layers"),
        ("upscale", "0-3", (4,), "an overlap of 4 does not fit 4 visits"),
        ("upscale", "{0|1}", (1,), "upscale needs a plain list of layers"),
        ("fuse", "0 1*2 2", (0, 2), "fuse needs a plain list of layers"),
        ("parallel", "0-3", (0, 3, 1), "groups of 1 are not parallel"),
        ("parallel", "0 @e 1", (0, 1, 2), "the stretch has marks"),
        ("permute", "0-2", ([0, 1],), "the order names 0, 1, the program visits 0, 1, 2"),
        ("permute", "0-2 0", ([0, 1, 2, 0],), "a layer is visited more than once"),
        ("tie", "0-3", ([[0, 1], [1, 2]],), "a layer stands in two groups"),
        ("tie", "0-3", ([[0, 9]],), "does not visit layer 9"),
        ("untie", "(0)*1..3", (), "is chosen at run time"),
        ("relax", "0-3 0*!2 1*2[lora=4]", (8,), "no loop shares its layers"),
        ("exits", "0-3", ([9],), "does not visit layer 9"),
        ("exits", "0 ?e0 1", ([0],), "the mark 'e0' is given twice"),
        ("prune", "0-14", ([3],), "layer 14 does not exist"),
    ],
)
def test_what_a_transform_refuses(name, text, args, reason):
    with pytest.raises(ProgramError, match=reason):
        getattr(transforms, name)(Program.parse(text), *args, depth=12)
