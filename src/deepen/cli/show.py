"""`deepen show`: what a model with a program is and costs; reads headers, never weights."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import deepen
from deepen.cli.options import KEEPING, Keeping
from deepen.cli.output import amount, give, pairs, program_text, ratio, runs, size
from deepen.errors import DeepenError, UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.program import Cost


def show(
    model: str,
    program: str = "",
    /,
    *,
    context: Annotated[int, Parameter(help="Tokens of the context that FLOPs and cache are stated for.")] = 1024,
    svg: Annotated[str, Parameter(help="Write the drawing to this SVG file.")] = "",
    common: Keeping = KEEPING,
) -> None:
    """Layers, program, parameters, FLOPs per token, cache and a drawing; reads no weights.

    Figures in brackets are relative to the identity program, which visits every layer once.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    program
        Such as '0-3 (4-7)*2 8-11', or @FILE; the model's own when none is given.
    """
    from deepen.program import read_program

    if context < 1:
        raise UsageError(f"--context {context}: expected at least 1")
    opened = deepen.open(model)
    checkpoint = opened.apply(read_program(program, common.form)) if program else opened
    if svg:
        write_drawing(checkpoint, Path(svg))
    if not give(common, "show", describe(checkpoint, context)):
        print(report(checkpoint, context))


def refused(checkpoint: Checkpoint) -> str | None:
    """Why the program cannot be run on this model, None when it can."""
    try:
        checkpoint.require_executable()
    except DeepenError as error:
        return str(error)
    return None


def write_drawing(checkpoint: Checkpoint, path: Path) -> None:
    """Writes the drawing of the default tower, or of the first one, as SVG."""
    from deepen.checkpoint.atomic import atomic_file
    from deepen.program.draw_svg import draw_svg

    tower = checkpoint.family.default_tower or next(iter(checkpoint.depth))
    with atomic_file(path) as file:
        file.write(draw_svg(checkpoint.plan(tower), program_text(checkpoint)))


def _tower(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    plan = checkpoint.plan(name)
    tower, sets = checkpoint.family.tower(name), checkpoint.sets[name]
    return {
        "tower": name,
        "layers": checkpoint.depth[name],
        "parts": tower.parts.letters,
        "kind": tower.parts.kind,
        "visits": [
            {"index": v.index, "key": str(v.key), "parts": v.parts, "turn": v.turn, "slot": v.slot, "writes": v.writes}
            for v in plan.visits
        ],
        "keys": [str(key) for key in plan.keys],
        "unvisited": sorted(set(range(plan.depth)) - {key.layer for key in plan.keys}),
        "slots": plan.slots if tower.caches else 0,
        "owned": {name: sum(map(prod, each.tensors().values())) for name, each in sets.items()},
        "marks": plan.marks,
        "loops": [{"text": loop.text, "minimum": loop.minimum, "maximum": loop.maximum} for loop in plan.loops],
        "warnings": plan.warnings,
    }


def _cost(cost: Cost) -> dict[str, Any]:
    names = ("params", "layers", "path", "flops", "visits", "slots", "cache_bytes", "context")
    return {name: getattr(cost, name) for name in names} | {"layers": float(cost.layers), "path": float(cost.path)}


def describe(checkpoint: Checkpoint, context: int = 1024) -> dict[str, Any]:
    """All of it as a document."""
    return {
        "model": checkpoint.where,
        "family": checkpoint.family.model_type,
        "program": program_text(checkpoint),
        "towers": [_tower(checkpoint, name) for name in checkpoint.depth],
        "cost": _cost(checkpoint.cost(context)),
        "identity": _cost(checkpoint.apply(checkpoint.identity).cost(context)),
        "refused": refused(checkpoint),
    }


def report(checkpoint: Checkpoint, context: int = 1024) -> str:
    """All of it as text for people."""
    from deepen.program.draw_text import draw_text

    document = describe(checkpoint, context)
    cost, whole = document["cost"], document["identity"]

    def line(title: str, name: str, text: str) -> tuple[str, str]:
        return title, f"{text}  ({ratio(cost[name], whole[name])})"

    rows = [("model", document["model"]), ("family", document["family"])]
    for tower in document["towers"]:
        left = f", not visited: {runs(tower['unvisited'])}" if tower["unvisited"] else ""
        kind = "not separable" if tower["kind"] == "whole" else f"{' '.join(tower['parts'])} ({tower['kind']})"
        rows.append((f"{tower['tower']} tower", f"{tower['layers']} layers, parts {kind}{left}"))
    own = sum(sum(tower["owned"].values()) for tower in document["towers"])
    rows += [
        ("program", document["program"]),
        line("parameters", "params", amount(cost["params"]) + (f", {amount(own)} of the program's own" if own else "")),
        line("FLOPs/token", "flops", f"{amount(cost['flops'])} at {context} tokens"),
        line("visits", "visits", f"{cost['visits']}"),
        line("critical path", "path", f"{cost['path']:g} layers"),
        line("cache slots", "slots", f"{cost['slots']}"),
        line("cache", "cache_bytes", f"{size(cost['cache_bytes'])} at {context} tokens"),
    ]
    rows += [("warning", text) for tower in document["towers"] for text in tower["warnings"]]
    lines = [pairs(rows)]
    if document["refused"]:
        lines += ["", "This program is read but cannot be run on this model:", document["refused"]]
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for tower in document["towers"]:
        heading = [f"{tower['tower']}:"] if len(document["towers"]) > 1 else []
        lines += ["", *heading, draw_text(checkpoint.plan(tower["tower"]), width)]
    return "\n".join(lines)
