"""The second half of the demo: which layers matter, and the best shorter program that a short search finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepen
from deepen.cli.output import amount, note, plain, table
from deepen.cli.packaged import TEXT_NAME
from deepen.cli.progress import progress
from deepen.cli.search import counter

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.report.kept import Kept

BUDGET = "0.75"
# The published rule, which looks at the model once, and a search that measures what it leaves out.
METHODS = ("contiguous", "greedy")
CONTEXT, CANDIDATES = 256, 60


def score_and_search(
    shared: Checkpoint, text: str, tokens: int, device: str, dtype: str | None, model: str, data: str
) -> list[Kept]:
    """The scores, and one search a method, as results that a page can show.

    Args:
        shared: the model, its tensors read once.
        text: half of it is searched on, half held out.
        tokens: read for the scores and at the end; half of them are searched on.
        device: where the weights go.
        dtype: what is computed in.
        model: as the user named it, empty for the packaged one.
        data: likewise.
    """
    from deepen.report.kept import Kept

    # two windows are the fewest that a score or an interval is made of
    searched, read = max(2 * CONTEXT, tokens // 2), max(2 * CONTEXT, tokens)
    named = {"model": model or Path(shared.where).name, "data": data or TEXT_NAME}
    # the page's commands set both words first
    start = '"$model" --data "$text"'
    options: dict[str, Any] = {"context": CONTEXT, "device": device, "dtype": dtype}
    with progress("scoring", None, "windows") as step:
        scores = deepen.score(shared, text=text, tokens=read, progress=step, **options)
    command = f"deepen score {start} --context {CONTEXT} --tokens {read}"
    kept = [Kept("score", command, Path(), plain({**named, **scores.to_json()}))]
    for method in METHODS:
        with progress(f"{method} search", None, "candidates") as step:
            found = deepen.search(
                shared,
                text,
                budget=BUDGET,
                method=method,
                candidates=CANDIDATES,
                tokens=searched,
                held_out_tokens=read,
                report=counter(step),
                **options,
            )
        note(f"      {method}: {found.program}, held out x{found.held_out.difference.ratio:.3g}")
        command = (
            f"deepen search {start} --budget {BUDGET} --method {method} --candidates {CANDIDATES} --context {CONTEXT} "
            f"--tokens {searched} --held-out-tokens {read}"
        )
        kept.append(Kept("search", command, Path(), plain({**named, **found.to_json()})))
    return kept


def search_table(kept: Sequence[Kept]) -> str:
    """What each search found, for people."""
    rows = [("search", "program", "held-out perplexity", "whole")]
    for each in kept:
        held_out = each.document["held_out"]
        rows.append(
            (
                str(each.document["method"]),
                str(each.document["program"]),
                amount(held_out["best"]["perplexity"] or float("inf")),
                amount(held_out["whole"]["perplexity"] or float("inf")),
            )
        )
    return table(rows, left=2)
