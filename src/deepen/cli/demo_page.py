"""The page of the demo: what was measured, drawn and written, and the commands that do the same."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepen import __version__
from deepen.cli.output import amount, size
from deepen.cli.packaged import MODEL, TEXT, TEXT_NAME
from deepen.report.page import Commands, Drawing, Facts, Page, Section, Table, Text, write
from deepen.report.study import sections_of

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.cli.baked import Baked
    from deepen.cli.demo import Result
    from deepen.report.kept import Kept


def write_page(
    path: Path,
    opened: Checkpoint,
    model: str,
    data: str,
    prompt: str,
    results: Sequence[Result],
    baked_program: str,
    baked: Baked,
    kept: Sequence[Kept],
    seconds: float,
) -> None:
    """Writes the page of the demo; an empty `model` or `data` stands for the one that comes in a package."""
    from deepen.cli.demo import rows

    name, text = Path(opened.where).name, Path(data).name if data else TEXT_NAME
    whole = results[0]
    heading, *cells = rows(list(results))
    evaluation = whole.evaluation
    explained = (
        f"Perplexity and bits per byte over {evaluation.tokens} tokens of {text}, windows of {evaluation.context} "
        "without overlap; lower is better. Reading is the speed of that pass, writing that of greedy decoding with a "
        "cache, both on this machine under its load at the time. Cache at a context of "
        f"{whole.cost.context} tokens. Nothing was trained: a cut model is meant to be healed afterwards."
    )
    page = Page(
        title="The depth of a network is a program",
        lead=f"{name}, cut, repeated, run in parallel, scored and searched without training, measured on {text}.",
        sections=[
            Section("The model", [Facts(facts(opened, whole))]),
            Section("What each program does to it", [Table(["", *heading[1:]], cells, explained, (2, 3, 4, 5, 6))]),
            Section("Drawings and samples", [drawing(opened, result, prompt) for result in results]),
            Section("Baked, and reloaded without deepen", baked_blocks(baked_program, baked)),
            *sections_of(kept),
            Section(
                "The same by hand",
                [Commands([*commands(model, data, results, baked_program), *(each.command for each in kept)])],
            ),
        ],
        foot=foot(seconds),
    )
    write(page, path)


def facts(opened: Checkpoint, whole: Result) -> list[tuple[str, str]]:
    cost = whole.cost
    tower, depth = next(iter(opened.depth.items()))
    return [
        ("family", opened.family.model_type),
        (f"layers ({tower})", f"{depth}"),
        ("parameters", amount(cost.params)),
        ("FLOPs/token", amount(cost.flops)),
        ("cache slots", f"{cost.slots}"),
        (f"cache at {cost.context} tokens", size(cost.cache_bytes)),
    ]


def drawing(opened: Checkpoint, result: Result, prompt: str) -> Drawing:
    from deepen.program.draw_svg import draw_svg

    cost, evaluation = result.cost, result.evaluation
    figures = f"perplexity {amount(evaluation.perplexity)}, {amount(cost.params)} parameters, {cost.visits} visits"
    plan = opened.apply(result.program).plan()
    return Drawing(result.name, result.program, draw_svg(plan), prompt, result.sample, figures)


def baked_blocks(program: str, baked: Baked) -> list[Text | Facts]:
    return [
        Text(
            f"{program} was written out as a plain checkpoint of {baked.layers} layers and loaded by transformers in a "
            f"process that never imports deepen. Its logits on {baked.tokens} tokens equal those of the model in "
            "memory within 4 times the difference that the model itself shows between eager and sdpa attention."
        ),
        Facts(
            [
                ("layers written", f"{baked.layers}"),
                ("weights", size(baked.bytes)),
                ("largest difference", f"{baked.difference:.3g}"),
                ("tolerance", f"{baked.tolerance:.3g}"),
                ("eager against sdpa", f"{baked.own:.3g}"),
                ("largest logit", f"{baked.largest:.3g}"),
            ]
        ),
    ]


def commands(model: str, data: str, results: Sequence[Result], baked_program: str) -> list[str]:
    """Shell lines that measure the same; empty names stand for what comes in packages."""
    evaluation = results[0].evaluation
    lines = [] if model and data else ["site=$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"]
    return [
        *lines,
        f"model={shlex.quote(model)}" if model else f"model=$site/{MODEL[0]}/{MODEL[1]}",
        f"text={shlex.quote(data)}" if data else f"text=$site/{TEXT[0]}/{TEXT[1]}",
        f"deepen show \"$model\" '{baked_program}'",
        f'deepen eval "$model" --data "$text" --context {evaluation.context} --tokens {evaluation.read} \\',
        "  " + " ".join(f"'{result.program}'" for result in results),
        f"deepen run \"$model\" '{baked_program}' --prompt 'Why is the sky blue?'",
        f"deepen apply \"$model\" '{baked_program}' -o baked --bake --verify",
    ]


def foot(seconds: float) -> str:
    import torch

    return (
        f"deepen {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, {seconds:.0f} s in all."
    )
