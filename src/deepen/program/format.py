"""The normal form: one text per tree, stable under parse and format."""

from __future__ import annotations

from collections.abc import Iterable

from deepen.program.attributes import show_attrs
from deepen.program.tree import Copy, Group, Loop, Mark, Node, Ref, Scope, Seq, several


def format_node(node: Node) -> str:
    """The text of a normalised tree: runs as `0-3`, one blank between items, no needless parentheses."""
    match node:
        case Seq(items=items):
            return " ".join(_runs(items)) or "_"
        case Ref():
            return _ref(node)
        case Mark():
            return f"{'?' if node.exit else '@'}{node.name}{show_attrs(node.attrs)}"
        case Group():
            return f"{{{'|'.join(format_node(branch) for branch in node.branches)}}}{show_attrs(node.attrs)}"
        case Scope(body=body):
            # `0*2[emb]` attaches to the loop and `0[a][b]` is one scope, so both need parentheses here
            text = f"({format_node(body)})" if isinstance(body, Loop | Scope) else _unit(body)
            return text + show_attrs(node.attrs)
        case Loop(body=body):
            count = f"{node.high}" if node.low == node.high else f"{node.low}..{node.high}"
            sign = "*!" if node.fresh else "**" if several(body) else "*"
            return f"{_unit(body)}{sign}{count}{show_attrs(node.attrs)}"


def _unit(node: Node) -> str:
    text = format_node(node)
    return f"({text})" if isinstance(node, Seq | Mark) and text != "_" else text


def _ref(ref: Ref) -> str:
    text = f"{ref.first}"
    if ref.last is not None:
        text += f"-{ref.last}" + (f"/{ref.stride}" if ref.stride > 1 else "")
    # the letters of `.a.f` together select nothing, so a selection is a single letter
    text += f".{ref.parts}" if ref.parts else ""
    return text + _copy(ref.copy) + show_attrs(ref.attrs)


def _copy(copy: Copy | None) -> str:
    if copy is None:
        return ""
    if copy.label is None:
        return f"!{copy.init or ''}"
    return f"!{copy.label}" + (f"={copy.init}" if copy.init else "")


def _runs(items: Iterable[Node]) -> Iterable[str]:
    """The items as texts, neighbouring bare layers merged into maximal rising or falling runs."""
    run: list[int] = []
    for item in items:
        layer = item.first.value if isinstance(item, Ref) and _plain(item) else None
        if run and layer is not None and _continues(run, layer):
            run.append(layer)
            continue
        if run:
            yield _run(run)
        run = [] if layer is None else [layer]
        if layer is None:
            yield format_node(item)
    if run:
        yield _run(run)


def _plain(ref: Ref) -> bool:
    return ref.bare and ref.last is None and not ref.first.from_end


def _continues(run: list[int], layer: int) -> bool:
    step = layer - run[-1]
    return abs(step) == 1 and (len(run) == 1 or step == run[1] - run[0])


def _run(run: list[int]) -> str:
    return f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"
