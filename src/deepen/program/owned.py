"""What a program owns beside its layers: the parameters of single visits, nodes and turns, and what they are called.

| attribute | one set of parameters for |
|---|---|
| `lora` on a layer | each place of the text, shared by all turns around it |
| `lora` on a loop | each place inside and each turn of that loop |
| `emb`, `norm`, `gate`, `inject` on a node | the node, shared by all turns around it |
| the same on a loop | each turn of that loop |

So `(1-3)*3[lora=8]` has nine adapters for each kind of matrix, and `(1-3)[lora=8]*3` has three. The turns of a loop of
copies, `*!`, visit different layers and share nothing: they count as if they were written out.

A set is called `kind.use.turn`. `use` counts the places that own something of this kind in the order in which they
first run, so the names stay when a program is stored and its text rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from deepen.program.tree import Attr, Loop, Mark, Node, Ref, Scope, children, value_of

# What acts on the stream where a node begins, in the order in which it acts.
ENTRIES = ("inject", "emb", "norm")
_OF_A_NODE = (*ENTRIES, "gate")


@dataclass(frozen=True, slots=True)
class Own:
    """One set of parameters that a program owns.

    Attributes:
        kind: the attribute: `lora`, `emb`, `norm`, `gate` or `inject`.
        use: running number of the place among those of the kind.
        turn: the turn of the loop that the attribute stands on, 0 where it stands on none.
        value: of the attribute, such as the rank.
    """

    kind: str
    use: int
    turn: int
    value: object

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.use}.{self.turn}"


# Where a set is used: kind, (`leaf`, `scope` or `loop`, its number), the turns of all loops around.
Place: TypeAlias = tuple[str, tuple[str, int], tuple[int, ...]]


def owned(root: Node) -> dict[Place, Own]:
    """The sets of a numbered tree by the place where each is used, in order of first execution at maximum counts."""
    found: dict[Place, Own] = {}
    uses: dict[str, dict[object, int]] = {}

    def own(attr: Attr, node: tuple[str, int], turn: tuple[int, ...], fresh: tuple[int, ...], at: int) -> None:
        numbers = uses.setdefault(attr.name, {})
        use = numbers.setdefault((node, fresh), len(numbers))
        found[attr.name, node, turn] = Own(attr.name, use, at, attr.value)

    def pass_over(node: Node, turn: tuple[int, ...], fresh: tuple[int, ...], lora: tuple[Attr, int] | None) -> None:
        match node:
            case Ref():
                nearest = _lora(node.attrs, 0) or lora
                if nearest is not None:
                    own(nearest[0], ("leaf", node.leaf), turn, fresh, nearest[1])
            case Loop(body=body):
                for passed in range(node.high):
                    deeper, at = ((*fresh, passed), 0) if node.fresh else (fresh, passed)
                    for attr in node.attrs:
                        if attr.name in _OF_A_NODE:
                            own(attr, ("loop", node.number), (*turn, passed), deeper, at)
                    pass_over(body, (*turn, passed), deeper, _lora(node.attrs, at) or lora)
            case Scope(body=body):
                for attr in node.attrs:
                    if attr.name in _OF_A_NODE:
                        own(attr, ("scope", node.number), turn, fresh, 0)
                pass_over(body, turn, fresh, lora)
            case Mark():
                return
            case _:
                for child in children(node):
                    pass_over(child, turn, fresh, lora)

    pass_over(root, (), (), None)
    return found


def _lora(attrs: tuple[Attr, ...], turn: int) -> tuple[Attr, int] | None:
    """The adapters that attributes hand down, with the turn of the loop they stand on."""
    if value_of(attrs, "lora") is None:
        return None
    return next(attr for attr in attrs if attr.name == "lora"), turn
