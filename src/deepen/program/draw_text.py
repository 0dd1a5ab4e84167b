"""A plan as a drawing for the terminal: time runs downwards, loops have a bracket, branches stand side by side.

0 → 1 → 2 → 3
╭ ×3  kv=first
│ 4 → 5 → 6 → 7
╰
┌───┬───┐
│ 8 │ 9 │ sum
└───┴───┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from deepen.program.attributes import show_attrs
from deepen.program.format import format_node
from deepen.program.plan import Plan
from deepen.program.tree import Group, Loop, Mark, Node, Ref, Scope, Seq, as_seq, value_of

_ARROW = " → "
_NARROWEST = 12


def draw_text(plan: Plan, width: int = 100) -> str:
    """The drawing, `width` columns wide unless branches side by side need more."""
    return "\n".join(line.rstrip() for line in _block(plan.root, leaf_labels(plan), max(width, _NARROWEST)))


def leaf_labels(plan: Plan) -> dict[int, str]:
    """What stands on each layer of the text: its keys in order of use, its part, the initial value of a copy."""
    keys: dict[int, list[str]] = {}
    parts: dict[int, str] = {}
    for visit in plan.visits:
        init = plan.inits.get(visit.key, "copy")
        text = f"{visit.key}" if init == "copy" else f"{visit.key} {init}"
        texts = keys.setdefault(visit.leaf, [])
        if text not in texts:
            texts.append(text)
        parts[visit.leaf] = visit.parts
    return {leaf: ", ".join(texts) for leaf, texts in keys.items()}


def loop_label(loop: Loop) -> str:
    """`×3`, `×1..32`, with the attributes of the loop."""
    count = f"×{loop.high}" if loop.low == loop.high else f"×{loop.low}..{loop.high}"
    words = [count, "each turn a copy" if loop.fresh else "", show_attrs(loop.attrs)[1:-1].replace(",", " ")]
    return "  ".join(filter(None, words))


def leaf_text(ref: Ref, labels: dict[int, str]) -> str:
    """The label of a leaf with its part and attributes; a leaf that is never visited shows its text."""
    label = labels.get(ref.leaf)
    if label is None:
        return format_node(ref)
    return label + (f".{ref.parts}" if ref.parts else "") + show_attrs(ref.attrs)


def _block(node: Node, labels: dict[int, str], width: int) -> list[str]:
    match node:
        case Seq(items=items):
            return list(_rows(items, labels, width)) or ["·"]
        case Ref():
            return [leaf_text(node, labels)]
        case Mark():
            return [f"⚑ {format_node(node)}"]
        case Loop(body=body):
            return _bracket(loop_label(node), _block(body, labels, width - 2))
        case Scope(body=body):
            return _bracket(show_attrs(node.attrs)[1:-1].replace(",", " "), _block(body, labels, width - 2))
        case Group(branches=branches):
            share = max((width - 1) // max(len(branches), 1) - 3, _NARROWEST)
            blocks = [_block(branch, labels, share) for branch in branches]
            return _table(blocks, str(value_of(node.attrs, "comb") or "sum"))


def _rows(items: Sequence[Node], labels: dict[int, str], width: int) -> Iterator[str]:
    """Layers flow along rows as words do; everything else has rows of its own."""
    row = ""
    for item in items:
        if isinstance(item, Seq):
            item = as_seq(item)
        if not isinstance(item, Ref):
            if row:
                yield row
            row = ""
            yield from _block(item, labels, width)
            continue
        word = leaf_text(item, labels)
        longer = f"{row}{_ARROW}{word}" if row else word
        if row and len(longer) > width - 2:
            yield row + " →"
            longer = word
        row = longer
    if row:
        yield row


def _bracket(label: str, body: list[str]) -> list[str]:
    return [f"╭ {label}", *(f"│ {line}" for line in body), "╰"]


def _table(blocks: list[list[str]], label: str) -> list[str]:
    widths = [max(map(len, block)) for block in blocks]
    rules = ["─" * (width + 2) for width in widths]
    rows = [
        "│ " + " │ ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " │"
        for row in zip_longest(*blocks, fillvalue="")
    ]
    rows[len(rows) // 2] += f" {label}"
    return [f"┌{'┬'.join(rules)}┐", *rows, f"└{'┴'.join(rules)}┘"]
