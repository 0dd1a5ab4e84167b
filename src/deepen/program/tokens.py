"""Text to tokens. Longest match first, so that `*!` and `**` come before `*`; columns are 1-based."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepen.errors import ProgramError

_TOKEN = re.compile(
    r"(?P<blank>[ \t\r\n;,]+)|(?P<int>[0-9]+)|(?P<name>[A-Za-z][A-Za-z0-9_]*)"
    r"|(?P<op>\*\*|\*!|\.\.|[*!.^/(){}|_@?:=-])"
)
_COMMENT = re.compile(r"#[^\n]*")
_ATTR = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_]*)(?P<equals>=(?P<value>[^,\]\s]*))?")
_BLANKS = re.compile(r"[ \t\r\n]*")
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class RawAttr:
    """An attribute as written: name, value text or None, column of the name."""

    name: str
    value: str | None
    column: int


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text. `kind` is int, name, attrs, end, or the operator itself."""

    kind: str
    text: str
    start: int
    end: int
    attrs: tuple[RawAttr, ...] = ()

    @property
    def column(self) -> int:
        return self.start + 1


def tokenise(text: str) -> list[Token]:
    """The tokens of a program, ending with one of kind `end`.

    Raises:
        ProgramError: a character outside the grammar, a malformed `[...]`, a number of absurd length.

    """
    tokens: list[Token] = []
    place = 0
    while place < len(text):
        if text[place] == "[":
            tokens.append(_attributes(text, place))
        elif text[place] == "#":
            if place and not text[place - 1].isspace():
                raise ProgramError("a comment starts at a line start or after a blank", text, place + 1)
            end = _match(_COMMENT, text, place).end()
            place = end
            continue
        else:
            found = _TOKEN.match(text, place)
            if found is None:
                raise ProgramError(f"unexpected character {text[place]!r}", text, place + 1)
            kind = found.lastgroup or ""
            if kind == "int" and len(found.group()) > _DIGITS:
                raise ProgramError(f"a number of {len(found.group())} digits is too large", text, place + 1)
            if kind == "blank":
                place = found.end()
                continue
            tokens.append(Token(found.group() if kind == "op" else kind, found.group(), place, found.end()))
        place = tokens[-1].end
    tokens.append(Token("end", "", len(text), len(text)))
    return tokens


def _attributes(text: str, start: int) -> Token:
    attrs: list[RawAttr] = []
    place = start + 1
    while True:
        place = _match(_BLANKS, text, place).end()
        found = _ATTR.match(text, place)
        if found is None:
            raise ProgramError("expected the name of an attribute", text, place + 1)
        if found["equals"] and not found["value"]:
            raise ProgramError(f"expected a value after {found['name']}=", text, found.end() + 1)
        attrs.append(RawAttr(found["name"], found["value"], place + 1))
        place = _match(_BLANKS, text, found.end()).end()
        stop = text[place : place + 1]
        if stop == "]":
            return Token("attrs", text[start : place + 1], start, place + 1, tuple(attrs))
        if stop != ",":
            raise ProgramError("expected ',' or ']' in the attributes", text, place + 1)
        place += 1


def _match(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    found = pattern.match(text, place)
    assert found is not None
    return found
