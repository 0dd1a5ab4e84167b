"""A program: the text that says which layer is visited when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deepen.errors import ProgramError, nearest
from deepen.program.check import check, size
from deepen.program.format import format_node
from deepen.program.normal import normalise
from deepen.program.notation import Form, guess, read_notation
from deepen.program.parse import parse_towers
from deepen.program.plan import Plan, make_plan
from deepen.program.tree import Node, Seq, as_seq


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """An immutable program; two are equal when their normal forms are.

    Attributes:
        towers: the normalised tree of each tower by name, `{"": tree}` when the text names none.
        text: as written; `str()` gives the normal form.

    Example:
        >>> from deepen.program import Program
        >>> str(Program.parse("0 1 2 3 (4-7)*2 8-^1"))
        '0-3 (4-7)*2 8-^1'

    """

    towers: Mapping[str, Node]
    text: str

    @classmethod
    def parse(cls, text: str, form: Form = "program") -> Program:
        """Read a program, or one of the notations `list`, `ranges`, `rys`.

        Raises:
            ProgramError: the text is malformed; the column says where.

        """
        form = guess(text) if form == "program" else form
        written = parse_towers(text) if form == "program" else {"": read_notation(text, form)}
        trees: dict[str, Node] = {}
        for name in sorted(written):
            size(written[name], text)
            tree = normalise(written[name])
            check(tree, text)
            trees[name] = tree
        return cls(MappingProxyType(trees), text)

    @classmethod
    def identity(cls, depth: int, tower: str = "") -> Program:
        """Every layer once, in order.

        Raises:
            ProgramError: a bank without layers.

        """
        if depth < 1:
            raise ProgramError(f"a model of {depth} layers has no program")
        run = f"0-{depth - 1}" if depth > 1 else "0"
        return cls.parse(f"{tower}: {run}" if tower else run)

    def tree(self, tower: str = "") -> Seq:
        """The normalised tree of a tower.

        Raises:
            ProgramError: the program has no such tower.

        """
        if tower not in self.towers:
            names = ", ".join(name or "(unnamed)" for name in self.towers)
            reason = f"the program has no tower {tower or '(unnamed)'!r}, it has {names}{nearest(tower, self.towers)}"
            raise ProgramError(reason, self.text)
        return as_seq(self.towers[tower])

    def with_tower(self, tower: str, body: Node | str) -> Program:
        """The program with the tree or text of one tower replaced or added.

        Raises:
            ProgramError: the text is malformed, or named and unnamed towers would be mixed.

        """
        added = as_seq(Program.parse(body).tree() if isinstance(body, str) else body)
        texts = {name: format_node(tree) for name, tree in self.towers.items()} | {tower: format_node(added)}
        if "" in texts and len(texts) > 1:
            raise ProgramError("name every tower or none", self.text)
        return Program.parse(_join(texts))

    def plan(self, depth: int, parts: Sequence[str], tower: str = "") -> Plan:
        """Expand a tower for a bank of `depth` layers; `parts[i]` are the part letters of layer i, such as `"af"`.

        Raises:
            ProgramError: a layer or part that the bank does not have, or a rule of the language that does not hold.

        """
        return make_plan(self.tree(tower), depth, parts, self.text)

    def __str__(self) -> str:
        return _join({name: format_node(tree) for name, tree in self.towers.items()})

    def __repr__(self) -> str:
        return f"Program({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Program) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        # a mapping proxy neither pickles nor copies
        return _restored, (dict(self.towers), self.text)


def read_program(text: str, form: Form = "program") -> Program:
    """A program from a text, or from a file when the text is `@path`.

    A text such as `@e 0-11`, with a blank, is a program that begins with a label.

    Raises:
        ProgramError: the text is malformed, or the file is missing or not text.

    """
    name = text.strip()[1:]
    if not text.strip().startswith("@") or not name or any(sign.isspace() for sign in name):
        return Program.parse(text, form)
    try:
        written = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ProgramError(f"cannot read the file {name!r} ({cause}); put a blank after a label", text, 1) from None
    return Program.parse(written, form)


def _restored(towers: dict[str, Node], text: str) -> Program:
    return Program(MappingProxyType(towers), text)


def _join(texts: Mapping[str, str]) -> str:
    return " ".join(f"{name}: {text}" if name else text for name, text in texts.items())
