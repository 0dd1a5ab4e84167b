"""The notations people already write, read into the same tree.

| form | text | means |
|---|---|---|
| list | `[0,1,2,1,2,3]` | these layers in this order |
| ranges | `[0,24],[8,32]` | half-open ranges, one after the other |
| rys | `(2,7)` | layers 0 to 6, then once more from 2 to the last |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from deepen.errors import ProgramError, nearest
from deepen.program.tree import Index, Node, Ref, Seq

Form: TypeAlias = Literal["program", "list", "ranges", "rys"]

_LIST = re.compile(r"\s*\[[\s0-9,]*\]\s*", re.ASCII)
_RANGES = re.compile(r"\s*\[[\s0-9,]*\](\s*[,;]?\s*\[[\s0-9,]*\])+\s*", re.ASCII)
_PIECE = re.compile(r"[0-9]+|[\[\](),;]|\S", re.ASCII)
_DIGITS = 12


def guess(text: str) -> Form:
    """The notation of a text that names none.

    Raises:
        ProgramError: brackets that can be read in two ways, or in none.

    """
    numbers = re.findall(r"[0-9]+", text)
    if _LIST.fullmatch(text):
        if len(numbers) == 2:
            first, last = numbers
            as_range = f"{first}-{int(last[:_DIGITS]) - 1}"
            raise ProgramError(
                f"[{first},{last}] can be read in two ways: the list `{first} {last}` or the half-open range "
                f"`{as_range}`; write one of these, or name the form: list or ranges",
                text,
                text.index("[") + 1,
            )
        if len(numbers) < 2:
            reason = "a list in brackets has at least three layers; write the layers without brackets"
            raise ProgramError(reason, text, text.index("[") + 1)
        return "list"
    return "ranges" if _RANGES.fullmatch(text) else "program"


def read_notation(text: str, form: Form) -> Seq:
    """The tree of a text in one of the other notations.

    Raises:
        ProgramError: the text is not in the notation, with the column of the first piece that does not fit.

    """
    if form not in get_args(Form):
        known = ", ".join(get_args(Form))
        raise ProgramError(f"unknown form {form!r}, expected one of {known}{nearest(form, get_args(Form))}", text)
    reader = _Reader(text)
    items = {"list": reader.list, "ranges": reader.ranges, "rys": reader.rys}[form]()
    reader.end()
    return Seq(tuple(items))


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    column: int


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pieces = [_Piece(found.group(), found.start() + 1) for found in _PIECE.finditer(text)]
        self.place = 0

    @property
    def piece(self) -> _Piece:
        return self.pieces[self.place] if self.place < len(self.pieces) else _Piece("", len(self.text) + 1)

    def skip(self, text: str) -> bool:
        found = self.piece.text == text
        self.place += found
        return found

    def fail(self, wanted: str) -> ProgramError:
        got = f"got {self.piece.text!r}" if self.piece.text else "the text ends"
        return ProgramError(f"expected {wanted}, {got}", self.text, self.piece.column)

    def expect(self, text: str) -> None:
        if not self.skip(text):
            raise self.fail(repr(text))

    def number(self) -> Index:
        piece = self.piece
        if not re.fullmatch(r"[0-9]+", piece.text, re.ASCII):
            raise self.fail("a layer number")
        if len(piece.text) > _DIGITS:
            raise ProgramError(f"a number of {len(piece.text)} digits is too large", self.text, piece.column)
        self.place += 1
        return Index(int(piece.text), column=piece.column)

    def end(self) -> None:
        if self.piece.text:
            raise self.fail("the end of the text")

    def list(self) -> list[Node]:
        bracket = self.skip("[")
        items: list[Node] = [Ref(self.number())]
        while self.piece.text not in ("]", ""):
            self.skip(",")
            items.append(Ref(self.number()))
        if bracket:
            self.expect("]")
        return items

    def ranges(self) -> list[Node]:
        # a list of lists, as Python and YAML print it, has brackets around the whole
        outer = len(self.pieces) > 1 and self.pieces[0].text == self.pieces[1].text == "["
        if outer:
            self.expect("[")
        items: list[Node] = [self.range()]
        while self.piece.text in ("[", ",", ";"):
            if self.piece.text != "[":
                self.place += 1
            items.append(self.range())
        if outer:
            self.expect("]")
        return items

    def range(self) -> Ref:
        self.expect("[")
        first = self.number()
        self.expect(",")
        stop = self.number()
        if stop.value <= first.value:
            reason = f"the half-open range [{first},{stop}] is empty"
            raise ProgramError(reason, self.text, first.column)
        self.expect("]")
        return Ref(first, Index(stop.value - 1, column=stop.column))

    def rys(self) -> list[Node]:
        self.expect("(")
        start = self.number()
        self.expect(",")
        stop = self.number()
        self.expect(")")
        last = Index(1, True, stop.column)
        if start.value == stop.value == 0:
            return [Ref(Index(0, column=start.column), last)]
        if stop.value <= start.value:
            reason = f"({start},{stop}) repeats nothing: the second number is the larger one"
            raise ProgramError(reason, self.text, stop.column)
        return [Ref(Index(0, column=start.column), Index(stop.value - 1, column=stop.column)), Ref(start, last)]
