"""Recursive descent from tokens to the tree, LL(1). Every error carries the column and what was expected.

Scope of a postfix: on a layer or a run, `.x`, `!`, `[...]` and `**` go to each layer, `*` and `*!` to the run as a
unit. On a `( )` or `{ }` every postfix acts on the whole, except `.x`, `!` and the attributes of visits (`kv`, `lora`,
`shard`), which go down to every visit inside, and `**`, which repeats each direct element of a `( )`; a `{ }` is one
element, and so is a mark, which is not repeated. An attribute that touches a repeat belongs to the loop.
"""

from __future__ import annotations

from dataclasses import replace

from deepen.errors import ProgramError
from deepen.program.attributes import ATTRIBUTES, read_attr
from deepen.program.normal import copied, goes_down, narrow, ordered, pushed
from deepen.program.tokens import Token, tokenise
from deepen.program.tree import Attr, Copy, Group, Index, Loop, Mark, Node, Ref, Scope, Seq, walk

PARTS = "afc"
INITS = ("zero", "rand", "copy")
MAX_HEIGHT = 64
_POSTFIX = (".", "*", "*!", "**", "!", "attrs")
_SEPARATES = (")", "}", "]", "(", "{", "|", ":")


def parse_towers(text: str) -> dict[str, Seq]:
    """The trees of a text by tower name, as written; one unnamed tower has the name `""`.

    Raises:
        ProgramError: the text is not in the grammar.

    """
    return _Parser(text).towers()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenise(text)
        self.place = 0
        # open parentheses, and the height of the tree under the item just read: both bound later recursion
        self.open = 0
        self.height = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.place]

    def take(self) -> Token:
        token = self.token
        self.place += token.kind != "end"
        return token

    def fail(self, reason: str, column: int | None = None) -> ProgramError:
        return ProgramError(reason, self.text, self.token.column if column is None else column)

    def touches(self) -> bool:
        """Whether the next token follows the last one without a separator."""
        return self.place > 0 and self.tokens[self.place - 1].end == self.token.start

    def expect(self, kind: str, what: str) -> Token:
        if self.token.kind != kind:
            raise self.fail(f"expected {what}{self.found()}")
        return self.take()

    def expect_touching(self, kind: str, what: str) -> Token:
        if self.token.kind == kind and not self.touches():
            raise self.fail(f"expected {what}, without a blank before it", self.tokens[self.place - 1].end + 1)
        return self.expect(kind, what)

    def found(self) -> str:
        return ", the text ends" if self.token.kind == "end" else f", got {self.token.text!r}"

    def at_tower(self) -> bool:
        return self.token.kind == "name" and self.tokens[self.place + 1].kind == ":"

    def towers(self) -> dict[str, Seq]:
        if not self.at_tower():
            trees = {"": self.seq()}
            if self.at_tower():
                raise self.fail("name every tower or none: the text before this one has no name")
        else:
            trees = {}
            while self.at_tower():
                name = self.take()
                self.take()
                if name.text in trees:
                    raise self.fail(f"the tower {name.text!r} is given twice", name.column)
                trees[name.text] = self.seq()
        if self.token.kind != "end":
            raise self.fail(f"unexpected {self.token.text!r}")
        return trees

    def seq(self) -> Seq:
        items: list[Node] = []
        height = 0
        while self.token.kind not in ("end", ")", "}", "|") and not self.at_tower():
            items.extend(self.item())
            height = max(height, self.height)
        self.height = height
        return Seq(tuple(items))

    def item(self) -> list[Node]:
        token = self.token
        before = self.tokens[self.place - 1].text
        if token.kind in ("int", "^") and self.touches() and not before.endswith(_SEPARATES):
            raise self.fail("separator needed: write a blank between two items")
        self.height = 0
        if token.kind in ("@", "?"):
            return [self.mark()]
        if token.kind in _POSTFIX:
            raise self.fail(f"expected a layer, a group or a mark; {token.text!r} must touch the item before it")
        nodes = [self.core()]
        while self.touches() and self.token.kind in _POSTFIX:
            self.grow()
            nodes = self.postfix(nodes)
        return nodes

    def grow(self) -> None:
        self.height += 1
        if self.height > MAX_HEIGHT:
            raise self.fail(f"nested deeper than {MAX_HEIGHT} levels")

    def inner(self, ends: str) -> list[Seq]:
        """The sequences up to a closing bracket, separated by `|` in a group."""
        self.take()
        self.open += 1
        if self.open > MAX_HEIGHT:
            raise self.fail(f"nested deeper than {MAX_HEIGHT} levels", self.tokens[self.place - 1].column)
        sequences = [self.seq()]
        height = self.height
        while ends == "}" and self.token.kind == "|":
            self.take()
            sequences.append(self.seq())
            height = max(height, self.height)
        self.expect(ends, "'|' or '}'" if ends == "}" else "')'")
        self.open -= 1
        self.height = height
        self.grow()
        return sequences

    def core(self) -> Node:
        token = self.token
        match token.kind:
            case "int" | "^":
                return self.ref()
            case "_":
                self.take()
                return Seq()
            case "(":
                return self.inner(")")[0]
            case "{":
                return Group(tuple(self.inner("}")), column=token.column)
            case _:
                raise self.fail(f"expected a layer, '(', '{{' or a mark{self.found()}")

    def ref(self) -> Ref:
        first = self.index()
        last, stride = None, 1
        if self.token.kind == "-" and self.touches():
            self.take()
            last = self.index()
        if self.token.kind == "/" and self.touches():
            self.take()
            step = self.expect_touching("int", "a stride")
            stride = int(step.text)
            if stride < 1:
                raise self.fail("a stride is at least 1", step.column)
        return Ref(first, last, stride)

    def index(self) -> Index:
        column = self.token.column
        if self.token.kind == "^":
            self.take()
            return Index(int(self.expect_touching("int", "a number after '^'").text), True, column)
        touching = self.place == 0 or self.tokens[self.place - 1].kind != "-" or self.touches()
        if not touching:
            raise self.fail("expected a layer number, without a blank before it", self.tokens[self.place - 1].end + 1)
        return Index(int(self.expect("int", "a layer number").text), False, column)

    def mark(self) -> Mark:
        sign = self.take()
        name = self.expect_touching("name", f"a name after {sign.text!r}")
        attrs: tuple[Attr, ...] = ()
        while self.touches() and self.token.kind in _POSTFIX:
            if sign.kind == "@" or self.token.kind != "attrs":
                what = "attributes" if self.token.kind == "attrs" else repr(self.token.text)
                raise self.fail(f"a mark takes no {what}")
            attrs = self.joined(attrs, [read_attr(raw, self.text, on_mark=True) for raw in self.take().attrs])
        return Mark(name.text, sign.kind == "?", attrs, sign.column)

    def postfix(self, nodes: list[Node]) -> list[Node]:
        sign = self.take()
        match sign.kind:
            case ".":
                part = self.expect_touching("name", f"a part: {', '.join('.' + part for part in PARTS)}")
                if part.text not in PARTS or len(part.text) != 1:
                    raise self.fail(f"expected a part: {', '.join('.' + part for part in PARTS)}", part.column)
                return [narrow(node, part.text) for node in nodes]
            case "!":
                copy = self.copy(sign)
                return [copied(node, copy, self.text) for node in nodes]
            case "attrs":
                for raw in sign.attrs:
                    attr = read_attr(raw, self.text)
                    nodes = [self.attributed(node, attr) for node in nodes]
                return nodes
            case "**":
                count = int(self.expect_touching("int", "a count").text)
                return [
                    part if isinstance(part, Mark) else Loop(part, count, count, column=sign.column)
                    for node in nodes
                    for part in (node.items if isinstance(node, Seq) else (node,))
                ]
            case _:
                return [self.loop(sign, nodes)]

    def copy(self, sign: Token) -> Copy:
        if self.token.kind != "name" or not self.touches():
            return Copy(None, None, sign.column)
        name = self.take()
        if self.token.kind != "=" or not self.touches():
            is_init = name.text in INITS
            return Copy(None if is_init else name.text, name.text if is_init else None, sign.column)
        self.take()
        init = self.expect_touching("name", f"an initial value: {', '.join(INITS)}")
        if init.text not in INITS:
            raise self.fail(f"expected an initial value: {', '.join(INITS)}", init.column)
        if name.text in INITS:
            raise self.fail(f"{name.text!r} is an initial value and cannot be a label", name.column)
        return Copy(name.text, init.text, sign.column)

    def loop(self, sign: Token, nodes: list[Node]) -> Loop:
        number = self.expect_touching("int", "a count")
        low = high = int(number.text)
        if sign.kind == "*" and self.token.kind == ".." and self.touches():
            self.take()
            high = int(self.expect_touching("int", "the largest count").text)
            if high < low:
                raise self.fail(f"the range {low}..{high} is empty", number.column)
        body = nodes[0] if len(nodes) == 1 and isinstance(nodes[0], Seq) else Seq(tuple(nodes))
        if sign.kind == "*!":
            for node in walk(body):
                if isinstance(node, Ref) and node.copy and node.copy.label is not None:
                    reason = f"the copy !{node.copy.label} has a label and cannot be copied again"
                    raise self.fail(reason, sign.column)
        return Loop(body, low, high, sign.kind == "*!", column=sign.column)

    def attributed(self, node: Node, attr: Attr) -> Node:
        """The node with one more attribute, at the place the attribute belongs to."""
        places = ATTRIBUTES[attr.name].places
        match node:
            case Mark():
                return node
            case Loop():
                if not places & {"loop", "visit"}:
                    raise self.misplaced(attr, "a loop")
                return replace(node, attrs=self.joined(node.attrs, [attr]))
            case Group() if "group" in places:
                return replace(node, attrs=self.joined(node.attrs, [attr]))
            case Scope(body=Group()) if "group" in places:
                return replace(node, body=self.attributed(node.body, attr))
            case Ref() if goes_down(attr):
                return replace(node, attrs=self.joined(node.attrs, [attr]))
            case _ if goes_down(attr):
                return pushed(node, attr)
            case _ if "node" not in places:
                raise self.misplaced(attr, "a node")
            case Scope():
                return replace(node, attrs=self.joined(node.attrs, [attr]))
            case _:
                return Scope(node, (attr,), attr.column)

    def misplaced(self, attr: Attr, place: str) -> ProgramError:
        names = {"loop": "a loop", "group": "a group {..|..}", "node": "a layer, ( ) or { }"}
        wanted = " or ".join(names[name] for name in sorted(ATTRIBUTES[attr.name].places) if name in names)
        return self.fail(f"the attribute {attr.name!r} stands on {wanted}, not on {place}", attr.column)

    def joined(self, attrs: tuple[Attr, ...], more: list[Attr]) -> tuple[Attr, ...]:
        for attr in more:
            if any(attr.name == other.name for other in attrs):
                raise self.fail(f"the attribute {attr.name!r} is given twice", attr.column)
            attrs = ordered((*attrs, attr))
        return attrs
