"""The page of a folder of results: the model, its scores by depth, what searches found, evaluations and samples."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepen.errors import DeepenError
from deepen.program import Program
from deepen.program.draw_svg import draw_svg
from deepen.report.chart import Line, Point, heat_map, lines, number, points
from deepen.report.comparison import comparison
from deepen.report.kept import Kept, floats
from deepen.report.page import Block, Chart, Charts, Commands, Drawing, Facts, Page, Section, Table, Text

# The score that says what leaving a visit out really costs; the others are compared with it.
MEASURED = "removal"
# Programs of a frontier that are listed.
LISTED = 12


def study_page(folder: Path, kept: Sequence[Kept]) -> Page:
    """The page.

    Args:
        folder: its name is the title.
        kept: at least one result.
    """
    models = list(
        dict.fromkeys(Path(str(each.document.get("model", ""))).name for each in kept if each.kind != "compare")
    )
    sections = sections_of(kept)
    sections.append(Section("The same by hand", [Commands([each.command for each in kept if each.command])]))
    kinds = [each.kind for each in kept]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return Page(
        title=f"{', '.join(models)}: which layers matter, and what can go" if models else _compared(kept),
        lead=f"{len(kept)} results in {folder.resolve().name}: {counted}.",
        sections=sections,
        foot="Nothing on this page was edited by hand; every figure is in the JSON files beside it.",
    )


def _compared(kept: Sequence[Kept]) -> str:
    """The title of a page that has comparisons alone."""
    suites = dict.fromkeys(Path(str(each.document["suite"])).stem for each in kept)
    return f"{', '.join(suites)}: variants under one budget"


def sections_of(kept: Sequence[Kept]) -> list[Section]:
    """The sections of some results, samples last."""
    makers: Mapping[str, Callable[[Kept], Iterator[Section]]] = {
        "show": _show,
        "score": _score,
        "search": _search,
        "eval": _eval,
        "compare": lambda kept: comparison(kept.document),
    }
    sections = [section for each in kept if each.kind in makers for section in makers[each.kind](each)]
    if samples := [each for each in kept if each.kind == "run"]:
        sections.append(Section("Samples", [_sample(each) for each in samples]))
    return sections


def _show(kept: Kept) -> Iterator[Section]:
    document = kept.document
    cost, whole = document["cost"], document["identity"]

    def share(name: str) -> str:
        return f" ({cost[name] / whole[name]:.2f} of the whole)" if whole[name] and cost[name] != whole[name] else ""

    rows = [
        ("family", str(document["family"])),
        ("program", str(document["program"])),
        *((f"layers ({tower['tower']})", str(tower["layers"])) for tower in document["towers"]),
        ("parameters", number(cost["params"]) + share("params")),
        ("FLOPs/token", number(cost["flops"]) + share("flops")),
        ("visits", str(cost["visits"])),
        ("cache slots", str(cost["slots"])),
        (f"cache at {cost['context']} tokens", f"{number(cost['cache_bytes'])}B" + share("cache_bytes")),
    ]
    yield Section("The model", [Facts(rows), *_drawings([("its program", str(document["program"]), "")])])


def _score(kept: Kept) -> Iterator[Section]:
    document = kept.document
    if "memories" in document:
        yield _memories(document)
        return
    labels = [str(row["layer"]) for row in document["rows"]]
    scores: Mapping[str, Any] = document["scores"]
    charts = []
    for name in (name for name in scores if "." not in name):
        parts = [part for part in (name, f"{name}.a", f"{name}.f") if part in scores]
        drawn = [Line(_part(part), floats(scores[part]["values"])) for part in parts]
        if any(math.isfinite(value) for value in drawn[0].values):
            legend = [line.name for line in drawn] if len(drawn) > 1 else []
            charts.append(Chart(name, lines(drawn, labels), str(scores[name]["meaning"]), legend))
    where = (
        f"Program {document['program']}, {document['tokens']} tokens of {_file(document)} in windows of "
        f"{document['context']}."
    )
    blocks: list[Block] = [Text(where), Charts(charts)]
    if agreement := agreements(scores):
        blocks.append(
            Table(
                ["score", "rank correlation with the measured drop"],
                [(name, f"{value:.2f}") for name, value in agreement],
                f"Spearman's rho over the visits between what each score says and {MEASURED}, the rise of the loss "
                "when that visit alone is left out; 1 is the same order, 0 none.",
                (1,),
            )
        )
    blocks += [Text(f"{name}: {note}") for name, note in document.get("notes", {}).items()]
    yield Section("Scores by depth", blocks)
    for name, matrix in document.get("matrices", {}).items():
        values = [floats(row) for row in matrix["values"]]
        if len(values) == len(labels) and all(len(row) == len(labels) for row in values):
            yield Section(f"{name}, visit by visit", [Charts([_matrix(name, matrix, values, labels)])])


def _memories(document: Mapping[str, Any]) -> Section:
    rows, listed = [], []
    for each in document["memories"]:
        agreement = "-" if each["agreement"] is None else f"{each['agreement']:.4f}"
        sizes = (f"{each[name]:.4g}" for name in ("active", "effective"))
        rows.append((f"{each['visit']} (layer {each['layer']})", str(each["count"]), *sizes, agreement))
        for neuron in each["neurons"]:
            spoken = " ".join(repr(token) for token in neuron["speaks"])
            fires = " | ".join(repr(text) for text, _ in neuron["fires"])
            listed.append((f"{neuron['visit']}, {neuron['neuron']}", spoken, fires))
    return Section(
        "Feed-forwards as memories",
        [
            Text(f"Program {document['program']}, read on {_file(document)}."),
            Table(
                ["visit", "memories", "active", "effective", "agreement"],
                rows,
                "Active: memories with a coefficient other than 0, a token. Effective: as many memories of one size "
                "would write as unevenly. Agreement: share of memories that speak for the token behind their top "
                "trigger.",
                (1, 2, 3, 4),
            ),
            Table(["visit, neuron", "speaks for", "fires on"], listed, "The strongest memories of each visit.", ()),
        ],
    )


def _matrix(name: str, matrix: Mapping[str, Any], values: list[list[float]], labels: Sequence[str]) -> Chart:
    if name == "effects":
        # Only later visits: an earlier one cannot change, and the skipped one always does.
        values = [
            [cell if across > down else math.nan for across, cell in enumerate(row)] for down, row in enumerate(values)
        ]
    return Chart(name, heat_map(values, labels, str(matrix["rows"]), str(matrix["columns"])), str(matrix["meaning"]))


def agreements(scores: Mapping[str, Any]) -> list[tuple[str, float]]:
    """How well each score that judges orders the visits as the measured drop does, best first."""
    if MEASURED not in scores:
        return []
    measured = floats(scores[MEASURED]["values"])
    found = []
    for name, score in scores.items():
        if name == MEASURED or "." in name or score["matters"] == "neither":
            continue
        sign = -1.0 if score["matters"] == "low" else 1.0
        value = spearman([sign * each for each in floats(score["values"])], measured)
        if math.isfinite(value):
            found.append((name, value))
    return sorted(found, key=lambda pair: -pair[1])


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation over the places where both are known; NaN where there is no order."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if math.isfinite(a) and math.isfinite(b)]
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    means = [sum(each) / len(each) if each else 0.0 for each in ranks]
    centred = [[rank - mean for rank in each] for each, mean in zip(ranks, means, strict=True)]
    spread = math.prod(math.sqrt(sum(value**2 for value in each)) for each in centred)
    return sum(a * b for a, b in zip(*centred, strict=True)) / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def _search(kept: Kept) -> Iterator[Section]:
    document = kept.document
    unit = str(document["budget"]).partition("=")[0]
    facts = [
        ("method", str(document["method"])),
        ("budget", str(document["budget"])),
        ("best program", str(document["program"])),
        (f"cost ({unit})", f"{number(document['cost'])} of {number(document['whole_cost'])}"),
        ("programs evaluated", str(document["candidates"])),
        ("layer visits run", f"{document['visits']['run']} instead of {document['visits']['separate']}"),
    ]
    rows = [_figures(name, document[key]) for name, key in (("searched on", "searched"), ("held out", "held_out"))]
    table = Table(
        ["text", "whole", "best", "best / whole", "95 % interval", "windows"],
        rows,
        f"Perplexity on {_file(document)}. What was searched on flatters the best program; the held-out half decided "
        "nothing. The interval is a paired bootstrap over windows.",
        (1, 2, 3, 4, 5),
    )
    frontier = document["frontier"]
    tokens = document["searched"]["whole"]["tokens"]
    marks = [
        Point(
            one["cost"],
            _perplexity(one["nll"], tokens),
            f"{one['program']}: perplexity {number(_perplexity(one['nll'], tokens))} at {number(one['cost'])}",
            one["program"] == document["program"],
        )
        for one in frontier
    ]
    chart = Chart(
        "Quality against cost",
        points(marks, f"cost ({unit})", "perplexity"),
        "Programs of which none is cheaper at a smaller loss, on the text that was searched on; hover for the program.",
    )
    listed = [(one.label.partition(": perplexity")[0], number(one.x), number(one.y)) for one in marks[:LISTED]]
    drawings = [("best program", str(document["program"]), f"found by {document['method']} search")]
    yield Section(
        f"Search: {document['method']}, {document['budget']}",
        [
            Facts(facts),
            table,
            Charts([chart]),
            Table(["program", f"cost ({unit})", "perplexity"], listed, "The frontier.", (1, 2)),
            *_drawings(drawings),
        ],
    )


def _figures(name: str, part: Mapping[str, Any]) -> tuple[str, ...]:
    moved = part["difference"]
    low, high = (math.exp(min(float(moved[end]), 700.0)) for end in ("low", "high"))
    return (
        name,
        number(float(part["whole"]["perplexity"] or math.inf)),
        number(float(part["best"]["perplexity"] or math.inf)),
        f"x{moved['ratio']:.4g}",
        f"{low:.4g} to {high:.4g}",
        str(moved["windows"]),
    )


def _perplexity(nll: float | None, tokens: int) -> float:
    return math.inf if nll is None else math.exp(min(nll / tokens, 700.0))


def _eval(kept: Kept) -> Iterator[Section]:
    results = kept.document["results"]
    shown = [name for name in ("perplexity", "bits_per_byte", "value") if name in results[0]]
    compared = any(row.get("difference") for row in results)
    timed = ("prefill", "decode") if any(row.get("speed") for row in results) else ()
    rows = []
    for row in results:
        cells = [str(row["program"]), *(number(math.inf if row[name] is None else float(row[name])) for name in shown)]
        if compared:
            cells += _against_first(row.get("difference"))
        cells += [number(float(row["speed"][name])) for name in timed]
        rows.append(tuple(cells))
    names = [name.replace("_", " ") for name in shown]
    names += ["against the first", "95 % interval"] if compared else []
    names += [f"{name} tokens/s" for name in timed]
    blocks: list[Block] = []
    if names:
        note = f"On {_file(kept.document)}; ratios of the perplexity, intervals paired over windows."
        blocks.append(Table(["program", *names], rows, note, tuple(range(1, len(names) + 1))))
    tasks = [
        (str(row["program"]), *(str(score.get(name)) for name in ("task", "metric")), f"{score['value']:.4g}")
        for row in results
        for score in row.get("tasks", [])
    ]
    if tasks:
        blocks.append(Table(["program", "task", "metric", "value"], tasks, "Tasks of lm-eval.", (3,)))
    yield Section("Evaluation", blocks)


def _against_first(difference: Mapping[str, Any] | None) -> list[str]:
    if difference is None:
        return ["", ""]
    if difference["low"] is None:
        return [f"x{difference['ratio']:.4g}", "one window, none"]
    low, high = (math.exp(min(difference[end], 700.0)) for end in ("low", "high"))
    return [f"x{difference['ratio']:.4g}", f"{low:.4g} to {high:.4g}"]


def _sample(kept: Kept) -> Drawing:
    document = kept.document
    figures = f"{document['tokens']} tokens, greedy or drawn as the command says"
    program = str(document["program"])
    return Drawing(
        Path(str(document["model"])).name,
        program,
        next((drawing.svg for drawing in _drawings([("", program, "")])), ""),
        str(document["prompt"]),
        " ".join(str(document["text"]).split()),
        figures,
    )


def _drawings(programs: Sequence[tuple[str, str, str]]) -> list[Drawing]:
    """Drawings of programs of one tower; a program of several towers has a drawing for each."""
    found = []
    for name, text, figures in programs:
        # what a newer deepen wrote may not be a program to this one
        with contextlib.suppress(DeepenError):
            program = Program.parse(text)
            depth = 1 + max(int(digits) for digits in re.findall(r"\d+", text))
            for tower in program.towers:
                plan = program.plan(depth, ["af"] * depth, tower)
                found.append(Drawing(f"{name} {tower}".strip(), text, draw_svg(plan), figures=figures))
    return found


def _part(name: str) -> str:
    return {"": "layer", "a": "mixer", "f": "feed-forward"}[name.partition(".")[2]]


def _file(document: Mapping[str, Any]) -> str:
    return Path(str(document.get("data", "a text"))).name
