import copy
import pickle

import pytest

from deepen.errors import ProgramError
from deepen.program import Key, Program, read_program


def keys(text: str, depth: int = 12) -> str:
    return " ".join(str(visit.key) for visit in Program.parse(text).plan(depth, ["af"] * depth).visits)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("12", 1, "layer 12 does not exist (the model has 12: 0-11)"),
        ("0 4-14", 5, "layer 14 does not exist (the model has 12: 0-11)"),
        ("0-30/4", 3, "layer 28 does not exist"),
        ("14-4", 1, "layer 14 does not exist"),
        ("0-^13", 3, "layer ^13 does not exist (the model has 12: ^12-^1)"),
        ("^0", 1, "layer ^0 does not exist"),
        ("0-", 3, "expected a layer number, the text ends"),
        ("0- 4", 3, "expected a layer number"),
        ("(0 1", 5, "expected ')', the text ends"),
        ("{0 (1 2} 3", 8, "expected ')', got '}'"),
        ("{0|1", 5, "expected '|' or '}', the text ends"),
        ("0-3)", 4, "unexpected ')'"),
        ("0 | 1", 3, "unexpected '|'"),
        ("3!4", 3, "separator needed"),
        ("_3", 2, "separator needed"),
        ("3^1", 2, "separator needed"),
        ("0 4-7*", 7, "expected a count, the text ends"),
        ("0 4-7*x", 7, "expected a count, got 'x'"),
        ("0* 2", 3, "expected a count, without a blank before it"),
        ("0 *3", 3, "'*' must touch the item before it"),
        ("0 [lora=3]", 3, "'[lora=3]' must touch the item before it"),
        ("3*2..1", 3, "the range 2..1 is empty"),
        ("(0 (1 2)*3..2)*2", 10, "the range 3..2 is empty"),
        ("0*!1..2", 5, "expected a layer"),
        ("0-4/0", 5, "a stride is at least 1"),
        ("0-4/x", 5, "expected a stride"),
        ("0.b", 3, "expected a part: .a, .f, .c"),
        ("0.af", 3, "expected a part"),
        ("0.a4", 3, "expected a part"),
        ("0.4", 3, "expected a part"),
        ("3!b=one", 5, "expected an initial value: zero, rand, copy"),
        ("3!zero=rand", 3, "'zero' is an initial value and cannot be a label"),
        ("3!b=zero 3 3!b=rand", 13, "the copy 3!b has two initial values: zero and rand"),
        ("(3!b)!c", 6, "the copy !b has a label and cannot be copied again"),
        ("0 (3!b 4)*!2", 10, "the copy !b has a label and cannot be copied again"),
        ("(0-3)*4[res=1/2:1]", 9, "res has 2 values, the loop has 4 turns"),
        ("(0-3)*4[emb,scale=1:2:3]", 13, "scale has 3 values, the loop has 4 turns"),
        ("(0-3)[cap=1:1/2]", 7, "cap has 2 values, one for each turn, but stands on no loop"),
        ("(0-3)*1..2[scale=1:2]", 12, "takes one value on a loop whose count is chosen at run time"),
        ("0[scal=1]", 3, "unknown attribute 'scal' (did you mean 'scale'?)"),
        ("0[scale=x]", 3, "scale takes a number such as 2, 1/2 or 0.5, got 'x'"),
        ("0[scale=1/0]", 3, "scale takes a number"),
        ("0[scale]", 3, "scale takes a number such as 2, 1/2 or 0.5, got nothing"),
        ("0[scale=]", 9, "expected a value after scale="),
        ("0[scale", 8, "expected ',' or ']'"),
        ("0[", 3, "expected the name of an attribute"),
        ("0[]", 3, "expected the name of an attribute"),
        ("0[emb=1]", 3, "emb takes no value, got '1'"),
        ("0[res=2/3]", 3, "res takes 1 or a fraction 1/g"),
        ("0[cap=0]", 3, "cap takes a share above 0"),
        ("0[cap=3/2]", 3, "cap takes a share above 0"),
        ("0[lora=0]", 3, "lora takes an integer of at least 1"),
        ("0[p=1]", 3, "p takes a probability below 1"),
        ("0[comb=mean]", 3, "the attribute 'comb' stands on a group {..|..}, not on a node"),
        ("0*2[comb=mean]", 5, "the attribute 'comb' stands on a group {..|..}, not on a loop"),
        ("{0|1}[comb=max]", 7, "comb takes one of sum, mean, gate"),
        ("(0 1)[grad=1]", 7, "the attribute 'grad' stands on a loop, not on a node"),
        ("0*2[solve=gs]", 5, "the attribute 'solve' stands on a layer, ( ) or { }, not on a loop"),
        ("0*2[draw=max]", 5, "draw needs a loop with a range of counts"),
        ("0*1..2[draw=normal]", 8, "draw takes uniform"),
        ("0[emb][emb]", 8, "the attribute 'emb' is given twice"),
        ("0[route=token]", 3, "route needs cap beside it"),
        ("0[conf=1]", 3, "the attribute 'conf' stands on an exit mark `?name` only"),
        ("0 ?e[emb]", 6, "the attribute 'emb' stands not on an exit mark"),
        ("0 ?e[confi=1]", 6, "unknown attribute 'confi' (did you mean 'conf'?)"),
        ("0 @e[conf=1]", 5, "a mark takes no attributes"),
        ("0 ?e*2", 5, "a mark takes no '*'"),
        ("0 @ e", 4, "expected a name after '@', without a blank"),
        ("0 @e 1 ?e", 8, "the mark 'e' is given twice"),
        ("0 ?main 1 ?main", 11, "the mark 'main' is given twice"),
        ("(0 ?main)*2", 4, "?main cannot stand inside a loop"),
        ("{0 ?e|1}", 4, "the exit ?e cannot stand inside { }"),
        ("(0 ?e 1)[res=1/2]", 4, "the exit ?e cannot stand under res below 1"),
        ("((0 ?e 1)*2[emb])[res=1/2]", 5, "the exit ?e cannot stand under res below 1"),
        ("(0 ?e 1)*2[res=1/2:1]", 4, "the exit ?e cannot stand under res below 1"),
        ("0[inject=e]", 3, "there is no label @e"),
        ("0[inject=e] @e", 3, "the label @e is not executed before this on every path"),
        ("(0[inject=e] @e)*2", 4, "the label @e is not executed before this on every path"),
        ("(0 @e)*0..2 1[inject=e]", 15, "the label @e is not executed before this on every path"),
        ("(0 @e)[when=decode] 1[inject=e]", 23, "the label @e is not executed before this on every path"),
        ("{0 @e|1[inject=e]}", 9, "the label @e is not executed before this on every path"),
        ("0 @start 1[inject=strat]", 12, "there is no label @strat (did you mean 'start'?)"),
        ("0 ?e 1[inject=e]", 8, "there is no label @e"),
        ("0[res=1/2,topo=anchor:e]", 11, "there is no label @e"),
        ("0[kv=first]", 3, "kv=first stands inside a loop only"),
        ("(0 1)[kv=cyc:2]", 7, "kv=cyc stands inside a loop only"),
        ("({0|1})[solve=gs]", 9, "solve needs a plain list of layers"),
        ("(0 @e 1)[solve=idn:2]", 10, "solve needs a plain list of layers"),
        ("", 1, "a program visits at least one layer"),
        (" \n# nothing", 1, "a program visits at least one layer"),
        ("_", 1, "a program visits at least one layer"),
        ("4.a.f", 1, "a program visits at least one layer"),
        ("3*0", 1, "a program visits at least one layer"),
        ("3#1", 2, "a comment starts at a line start or after a blank"),
        ("0-٣", 3, "unexpected character '٣'"),
        ("0 é", 3, "unexpected character 'é'"),
        ("0 a", 3, "expected a layer, '(', '{' or a mark, got 'a'"),
        ("0 text: 1", 3, "name every tower or none"),
        ("text: 0 text: 1", 9, "the tower 'text' is given twice"),
    ],
)
def test_an_error_carries_its_column_and_reason(text, column, reason):
    with pytest.raises(ProgramError) as error:
        keys(text)
    assert reason in error.value.reason
    assert error.value.column == column
    assert error.value.text == text


def test_the_message_shows_the_line_and_a_caret():
    with pytest.raises(ProgramError) as error:
        Program.parse("0-3\n (4 5)) 6")
    assert str(error.value) == "program column 11: unexpected ')'\n   (4 5)) 6\n        ^"


@pytest.mark.parametrize(
    "text",
    ["0*999999999", "((0)*1000)*1000", "((((0*99)*99)*99)*99)*99", "0*!4097", "(_*99999)*2 0", "0-99999", "0*0..5000"],
)
def test_the_expansion_limit_is_checked_before_expanding(text):
    with pytest.raises(ProgramError, match="the limit is 4096"):
        Program.parse(text)


def test_the_expansion_limit_names_the_innermost_loop_that_exceeds_it():
    with pytest.raises(ProgramError, match=r"the loop `\(0-3\)\*2000` expands to 8000 visits") as error:
        Program.parse("(1 (0-3)*2000)*2")
    assert error.value.column == 9
    assert len(Program.parse("0-3*1024").plan(4, ["af"] * 4).visits) == 4096
    with pytest.raises(ProgramError, match="the limit is 4096"):
        Program.parse("(0-^1)*2000").plan(12, ["af"] * 12)


@pytest.mark.parametrize(
    "text",
    ["(" * 5000 + "0" + ")" * 5000, "{" * 5000, "0" + "*1" * 5000, "0" + "!" * 5000, "(" * 60 + "0" + ")*1*1" * 60],
    ids=["parentheses", "braces", "repeats", "copies", "both"],
)
def test_deep_nesting_is_an_error_of_the_program(text):
    with pytest.raises(ProgramError, match="nested deeper than 64 levels"):
        Program.parse(text)


def test_nesting_below_the_limit_and_long_flat_texts_are_fine():
    assert keys("(" * 60 + "0" + ")" * 60) == "0"
    assert keys("_ " * 10_000 + "3") == "3"
    with pytest.raises(ProgramError, match="5000 digits"):
        Program.parse("9" * 5000)
    with pytest.raises(ProgramError, match="5000 visits, the limit is 4096"):
        Program.parse("0 " * 5000)


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        ("0-3", "0 1 2 3"),
        ("7-4", "7 6 5 4"),
        ("10-0/2", "10 8 6 4 2 0"),
        ("0-10/4", "0 4 8"),
        ("^1", "11"),
        ("^1-^12", "11 10 9 8 7 6 5 4 3 2 1 0"),
        ("8-^1/2", "8 10"),
        ("0,1;2\t3\r\n4 # five\n# six\n5", "0 1 2 3 4 5"),
        ("(0)(1){2}3", "0 1 2 3"),
        ("4-5*2", "4 5 4 5"),
        ("4-5**2", "4 4 5 5"),
        ("(0-1 (2 3))**2", "0 0 1 1 2 3 2 3"),
        ("0-1**2**2", "0 0 0 0 1 1 1 1"),
        ("0-1**2*2", "0 0 1 1 0 0 1 1"),
        ("{0|1}**2", "0 1 0 1"),
        ("(0 @e 1)**2", "0 0 1 1"),
        ("(0-1 _)*2", "0 1 0 1"),
        ("(3!)*2", "3!1 3!1"),
        ("(3*2)!", "3!1 3!1"),
        ("3! 3!", "3!1 3!2"),
        ("3!! 3", "3!1 3"),
        ("3-4! 3!", "3!1 4!1 3!2"),
        ("(0-1)*!3", "0 1 0!1 1!1 0!2 1!2"),
        ("0-1*!2", "0 1 0!1 1!1"),
        ("(0*!2)*2", "0 0!1 0 0!1"),
        ("(0*!2)*!2", "0 0!1 0!2 0!3"),
        ("(0*2)*!2", "0 0 0!1 0!1"),
        ("(3!)*!2", "3!1 3!2"),
        ("0-1!b 0!b 0", "0!b 1!b 0!b 0"),
        ("(0-5)!b 0-5 ^1 3!b", "0!b 1!b 2!b 3!b 4!b 5!b 0 1 2 3 4 5 11 3!b"),
        ("0-5 6-11/2 7-11/2", "0 1 2 3 4 5 6 8 10 7 9 11"),
    ],
)
def test_the_trace(text, trace):
    assert keys(text) == trace
    assert keys(str(Program.parse(text))) == trace


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("0-11", "0 1 2 3 4 5 6 7 8 9 10 11"),
        ("4-7*3", "(4-7)*3"),
        ("0-1**2[lora=4]", "0*2[lora=4] 1*2[lora=4]"),
        ("((0))*1", "0*1"),
        ("0[scale=.5]", "(0)[scale=0.50]"),
        ("0[emb,scale=1/2]", "0[scale=1/2][emb]"),
        ("(0 1)[lora=4]", "0[lora=4] 1[lora=4]"),
        ("(0*2)[lora=4]", "0[lora=4]*2"),
        ("(0[kv=none] 1)[kv=own]", "0[kv=none] 1[kv=own]"),
        ("(0 1)!", "0! 1!"),
        ("(3!zero)!", "3!zero"),
        ("(3!zero)!copy", "3!"),
        ("(3*2).a", "3.a*2"),
        ("({0|1}*2[emb]).f", "{0.f|1.f}*2[emb]"),
        ("0 4.a.f 1", "0-1"),
        ("b: 0 a: 1", "a: 1\nb: 0"),
    ],
)
def test_programs_with_one_normal_form_are_equal(left, right):
    first, second = Program.parse(left), Program.parse(right)
    assert first == second
    assert hash(first) == hash(second)
    assert str(first) == str(second)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("0*2[emb]", "(0*2)[emb]"),
        ("0*2[emb]", "0[emb]*2"),
        ("0*2", "0*!2"),
        ("0 0", "0*2"),
        ("(0 1)[scale=1/2]", "0-1[scale=1/2]"),
        ("3!b", "3!c"),
        ("3!", "3"),
        ("{0|1}", "{0|1}[comb=mean]"),
    ],
)
def test_programs_that_differ_are_not_equal(left, right):
    assert Program.parse(left) != Program.parse(right)


def test_a_program_is_not_equal_to_its_text():
    assert Program.parse("0") != "0"


def test_towers():
    program = Program.parse("vision: 0-3 text: (0-1)*2 # the decoder")
    assert list(program.towers) == ["text", "vision"]
    assert str(program) == "text: (0-1)*2 vision: 0-3"
    assert len(program.plan(4, ["af"] * 4, "vision").visits) == 4
    with pytest.raises(ProgramError, match=r"no tower 'txt', it has text, vision \(did you mean 'text'\?\)"):
        program.plan(4, ["af"] * 4, "txt")
    changed = program.with_tower("vision", "3-0")
    assert str(changed) == "text: (0-1)*2 vision: 3-0"
    assert str(program) == "text: (0-1)*2 vision: 0-3"
    assert changed.with_tower("vision", program.towers["vision"]) == program
    with pytest.raises(ProgramError, match="name every tower or none"):
        Program.parse("0").with_tower("text", "0")
    # marks and labels are per tower
    assert Program.parse("a: 0 @e b: 0 @e 1[inject=e]")


def test_the_identity_program():
    assert Program.identity(12) == Program.parse("0-11")
    assert Program.identity(1) == Program.parse("0")
    assert str(Program.identity(3, "text")) == "text: 0-2"
    with pytest.raises(ProgramError, match="a model of 0 layers"):
        Program.identity(0)


def test_a_program_keeps_its_text_and_survives_pickling_and_copying():
    program = Program.parse("0 1  2")
    assert (program.text, str(program), repr(program)) == ("0 1  2", "0-2", "Program('0-2')")
    for twin in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program)):
        assert twin == program
        assert twin.text == program.text
        assert twin.towers == program.towers


def test_keys_print_as_in_the_text():
    assert [str(key) for key in (Key(3), Key(3, "1"), Key(3, "b"))] == ["3", "3!1", "3!b"]
    assert Key(3) == (3, None)


def test_a_program_is_read_from_a_file(tmp_path):
    path = tmp_path / "deep.txt"
    path.write_text("# a loop\n0-3\n(4-7)*2\n", encoding="utf-8")
    assert read_program(f"@{path}") == Program.parse("0-3 (4-7)*2")
    assert read_program("0-3") == Program.parse("0-3")
    assert read_program("@e 0-3") == Program.parse("@e 0-3")
    path.write_text("[0,2],[1,3]", encoding="utf-8")
    assert read_program(f"@{path}", "ranges") == Program.parse("0-1 1-2")
    with pytest.raises(ProgramError, match=r"cannot read the file 'missing\.txt'"):
        read_program("@missing.txt")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProgramError, match="not a text file"):
        read_program(f"@{path}")
