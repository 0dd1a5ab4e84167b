import pytest

from deepen.errors import ProgramError
from deepen.program import Program


@pytest.mark.parametrize(
    ("text", "form", "normal"),
    [
        ("[0,1,2,3,4,5,3,4]", "program", "0-5 3-4"),
        (" [0, 1, 2] ", "program", "0-2"),
        ("[0,24],[8,32]", "program", "0-23 8-31"),
        ("[0, 24] [8, 32]", "program", "0-23 8-31"),
        ("(2,7)", "program", "2 7"),
        ("[0,24]", "list", "0 24"),
        ("0 24", "list", "0 24"),
        ("5,3", "list", "5 3"),
        ("[7]", "list", "7"),
        ("[0,24]", "ranges", "0-23"),
        ("[[0,24],[8,32]]", "ranges", "0-23 8-31"),
        ("[3,4];[0,2]", "ranges", "3 0-1"),
        ("(2,7)", "rys", "0-6 2-^1"),
        ("(0,0)", "rys", "0-^1"),
        ("(0, 3)", "rys", "0-2 0-^1"),
    ],
)
def test_other_notations(text, form, normal):
    program = Program.parse(text, form)
    assert str(program) == normal
    assert program == Program.parse(normal)
    assert program.text == text


def test_rys_on_a_model():
    visits = Program.parse("(2,7)", "rys").plan(9, ["af"] * 9).visits
    assert [visit.key.layer for visit in visits] == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 7, 8]


def test_a_single_pair_is_refused_with_both_readings():
    with pytest.raises(ProgramError) as error:
        Program.parse(" [0,24]")
    assert "`0 24`" in str(error.value)
    assert "`0-23`" in str(error.value)
    assert error.value.column == 2


@pytest.mark.parametrize(
    ("text", "form", "column", "reason"),
    [
        ("[5]", "program", 1, "at least three layers"),
        ("[]", "program", 1, "at least three layers"),
        ("[0,1,2],[3,4]", "program", 5, "expected ']', got ','"),
        ("[0,24],[8]", "program", 10, "expected ',', got ']'"),
        ("[4,4],[0,2]", "program", 2, "the half-open range [4,4] is empty"),
        ("[0,2],[9,5]", "ranges", 8, "the half-open range [9,5] is empty"),
        ("[0,1", "list", 5, "expected ']', the text ends"),
        ("[0,x]", "list", 4, "expected a layer number, got 'x'"),
        ("0,1]", "list", 4, "expected the end of the text, got ']'"),
        ("[0,2],", "ranges", 7, "expected '[', the text ends"),
        ("2,7", "rys", 1, "expected '(', got '2'"),
        ("(2,7) 3", "rys", 7, "expected the end of the text"),
        ("(7,2)", "rys", 4, "repeats nothing"),
        ("(3,3)", "rys", 4, "repeats nothing"),
        ("(2," + "9" * 50 + ")", "rys", 4, "50 digits"),
        ("[0,9999999],[0,2]", "program", 2, "9999999 visits"),
        ("0", "rust", None, "unknown form 'rust'"),
        ("", "list", 1, "expected a layer number, the text ends"),
    ],
)
def test_malformed_notations(text, form, column, reason):
    with pytest.raises(ProgramError) as error:
        Program.parse(text, form)
    assert reason in error.value.reason
    assert error.value.column == column


def test_a_layer_that_does_not_exist_is_shown_in_the_notation_as_written():
    for text, form, column, layer in [("[0,1,12]", "list", 6, 12), ("[0,2],[8,15]", "ranges", 10, 14)]:
        with pytest.raises(ProgramError, match=f"layer {layer} does not exist") as error:
            Program.parse(text, form).plan(12, ["af"] * 12)
        assert error.value.column == column
