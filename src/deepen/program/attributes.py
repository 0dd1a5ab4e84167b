"""The table of attributes: where each may stand, how its value is read, its default and its identity value.

An attribute that is not in the table is an error, never ignored. Third parties add theirs with `register`. Which of
them a back end executes is the back end's own decision; it refuses the others by name from `Plan.uses`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from deepen.errors import ProgramError, nearest
from deepen.program.tokens import RawAttr
from deepen.program.tree import Attr

PLACES = ("visit", "node", "loop", "group", "mark")
_NUMBER = re.compile(r"[0-9]{1,12}(/[0-9]{1,12}|\.[0-9]{1,12})?|\.[0-9]{1,12}", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One row of the table.

    Attributes:
        name: as written in the program.
        places: where it may stand: on visits (it goes down to every visit inside), on a node, on a loop, on a `{}`
            group, on an exit mark.
        read: text of the value (None for a bare name) to the value; raises ValueError saying what was expected.
        default: what holds where the attribute is absent.
        identity: the value under which the node equals the plain one, or None when there is none.
        needs: another attribute without which this one means nothing.
        turns: whether a loop takes a list, one value per turn.

    """

    name: str
    places: frozenset[str]
    read: Callable[[str | None], object]
    default: object = None
    identity: object = None
    needs: str | None = None
    turns: bool = False


def number(text: str) -> Fraction:
    """A non-negative integer, fraction `1/2` or decimal.

    Raises:
        ValueError: anything else.

    """
    if not _NUMBER.fullmatch(text) or (("/" in text) and int(text.split("/")[1]) == 0):
        raise ValueError("a number such as 2, 1/2 or 0.5")
    return Fraction(text)


def show(value: object) -> str:
    """The text of a parsed value, without loss."""
    if isinstance(value, tuple):
        return ":".join(show(part) for part in value)
    return str(value)


def show_attrs(attrs: tuple[Attr, ...]) -> str:
    """`[a=1,b]`, or nothing when there is no attribute."""
    if not attrs:
        return ""
    parts = (attr.name if attr.value is True else f"{attr.name}={show(attr.value)}" for attr in attrs)
    return f"[{','.join(parts)}]"


def _flag(text: str | None) -> object:
    if text is not None:
        raise ValueError("no value")
    return True


def _whole(least: int) -> Callable[[str | None], object]:
    def read(text: str | None) -> object:
        if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise ValueError(f"an integer of at least {least}")
        return int(text)

    return read


def _numbers(accept: Callable[[Fraction], bool], what: str) -> Callable[[str | None], object]:
    def read(text: str | None) -> object:
        values = tuple(number(part) for part in (text or "").split(":"))
        if not all(accept(value) for value in values):
            raise ValueError(what)
        return values

    return read


def _one(accept: Callable[[Fraction], bool], what: str) -> Callable[[str | None], object]:
    def read(text: str | None) -> object:
        value = number(text or "")
        if not accept(value):
            raise ValueError(what)
        return value

    return read


def _choice(*names: str) -> Callable[[str | None], object]:
    def read(text: str | None) -> object:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}{nearest(text or '', names)}")
        return text

    return read


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a name")
    return text


def _kv(text: str | None) -> object:
    kind, _, rest = (text or "").partition(":")
    if kind == "cyc":
        return ("cyc", _whole(1)(rest))
    if rest:
        raise ValueError("own, first, last, mean, cyc:N, none or a name")
    return _name(kind)


def _inject(text: str | None) -> object:
    label, _, how = (text or "").partition(":")
    return (_name(label), _choice("add", "concat")(how or "add"))


def _topo(text: str | None) -> object:
    kind, _, label = (text or "").partition(":")
    if kind == "anchor":
        return ("anchor", _name(label))
    return (_choice("replace")(text),)


def _draw(text: str | None) -> object:
    kind, *rest = (text or "").split(":")
    arity = {"uniform": 0, "max": 0, "poisson": 1, "lognormal": 2}.get(kind)
    if arity is None or len(rest) != arity:
        raise ValueError("uniform, max, poisson:MEAN or lognormal:MEAN:SIGMA")
    return (kind, *(number(part) for part in rest))


def _solve(text: str | None) -> object:
    kind, *rest = (text or "").split(":")
    if kind == "gs" and not rest:
        return ("gs",)
    if kind not in ("jacobi", "idn", "hcn") or len(rest) != 1:
        raise ValueError("jacobi:K, idn:K, hcn:K or gs")
    return (kind, _whole(1)(rest[0]))


def _conf(text: str | None) -> object:
    return inf if text == "inf" else number(text or "")


_ANY = frozenset({"node", "loop"})
_UNIT = Fraction(1)
_TABLE = (
    Attribute("lora", frozenset({"visit"}), _whole(1)),
    Attribute("kv", frozenset({"visit"}), _kv, default="own", identity="own"),
    Attribute("shard", frozenset({"visit"}), _whole(0)),
    Attribute("scale", _ANY, _numbers(lambda s: True, ""), default=(_UNIT,), identity=(_UNIT,), turns=True),
    Attribute(
        "res",
        _ANY,
        _numbers(lambda r: r > 0 and r.numerator == 1, "1 or a fraction 1/g with an integer g"),
        default=(_UNIT,),
        identity=(_UNIT,),
        turns=True,
    ),
    Attribute("topo", _ANY, _topo, needs="res"),
    Attribute("down", _ANY, _choice("mean", "attn"), default="mean", needs="res"),
    Attribute(
        "cap",
        _ANY,
        _numbers(lambda c: 0 < c <= 1, "a share above 0 and at most 1"),
        default=(_UNIT,),
        identity=(_UNIT,),
        turns=True,
    ),
    Attribute("route", _ANY, _choice("token", "seq"), needs="cap"),
    Attribute("emb", _ANY, _flag),
    Attribute("inject", _ANY, _inject),
    Attribute("gate", _ANY, _choice("scalar", "vector", "token")),
    Attribute("norm", _ANY, _flag),
    Attribute("p", _ANY, _one(lambda q: q < 1, "a probability below 1"), default=Fraction(0), identity=Fraction(0)),
    Attribute("when", _ANY, _choice("prefill", "decode", "train", "eval")),
    Attribute("solve", frozenset({"node"}), _solve),
    Attribute("grad", frozenset({"loop"}), _whole(0)),
    Attribute("draw", frozenset({"loop"}), _draw, default=("max",)),
    Attribute("comb", frozenset({"group"}), _choice("sum", "mean", "gate"), default="sum"),
    Attribute("conf", frozenset({"mark"}), _conf, default=inf, identity=inf),
    Attribute("loss", frozenset({"mark"}), _one(lambda w: True, ""), default=Fraction(0), identity=Fraction(0)),
    Attribute("head", frozenset({"mark"}), _choice("shared", "own"), default="shared"),
    Attribute("norm", frozenset({"mark"}), _choice("shared", "own"), default="shared"),
)

ATTRIBUTES: dict[str, Attribute] = {}
MARK_ATTRIBUTES: dict[str, Attribute] = {}


def register(attribute: Attribute) -> Attribute:
    """Add a row to the table.

    Raises:
        ValueError: the name is taken, or a place is unknown, or a mark attribute also stands elsewhere.

    """
    if not attribute.places or not attribute.places <= set(PLACES):
        raise ValueError(f"attribute {attribute.name!r}: places are {', '.join(PLACES)}")
    on_mark = "mark" in attribute.places
    if on_mark and len(attribute.places) > 1:
        raise ValueError(f"attribute {attribute.name!r}: an attribute of marks stands on marks only")
    table = MARK_ATTRIBUTES if on_mark else ATTRIBUTES
    if attribute.name in table:
        raise ValueError(f"attribute {attribute.name!r} is registered already")
    table[attribute.name] = attribute
    return attribute


for _row in _TABLE:
    register(_row)


def read_attr(raw: RawAttr, text: str, on_mark: bool = False) -> Attr:
    """Look the attribute up and read its value.

    Raises:
        ProgramError: an unknown name or a malformed value, with the column of the attribute.

    """
    table, other = (MARK_ATTRIBUTES, ATTRIBUTES) if on_mark else (ATTRIBUTES, MARK_ATTRIBUTES)
    attribute = table.get(raw.name)
    if attribute is None:
        if raw.name in other:
            place = "not on an exit mark" if on_mark else "on an exit mark `?name` only"
            raise ProgramError(f"the attribute {raw.name!r} stands {place}", text, raw.column)
        raise ProgramError(f"unknown attribute {raw.name!r}{nearest(raw.name, table)}", text, raw.column)
    try:
        return Attr(raw.name, attribute.read(raw.value), raw.column)
    except ValueError as error:
        got = "nothing" if raw.value is None else repr(raw.value)
        raise ProgramError(f"{raw.name} takes {error}, got {got}", text, raw.column) from None
