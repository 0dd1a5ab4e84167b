"""`deepen search`: the best program under a budget, on a text of yours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import KEEPING, Keeping
from deepen.cli.output import amount, give, note, pairs, table
from deepen.cli.progress import progress
from deepen.errors import SaveError

if TYPE_CHECKING:
    from deepen.adaptive.search.problem import Problem
    from deepen.adaptive.search.search import Found, Part

# Programs of the frontier that are printed before the rest is counted.
LISTED = 12


def search(
    model: str,
    /,
    *,
    data: Annotated[str, Parameter(help="A UTF-8 text file; its second half is held out.")],
    budget: Annotated[str, Parameter(help="A share of the layers, or KIND=SHARE: flops, params, cache, latency.")],
    method: Annotated[str, Parameter(help="random, contiguous, greedy, beam, evolution or mcts.")] = "beam",
    moves: Annotated[
        str, Parameter(help="drop, part, restore, repeat, loop, swap, move, group, scale.")
    ] = "drop,restore,swap",
    candidates: Annotated[int, Parameter(help="Programs to evaluate, at most.")] = 200,
    minutes: Annotated[float | None, Parameter(help="Minutes to search, at most.")] = None,
    seed: Annotated[int, Parameter(help="Of all draws.")] = 0,
    out: Annotated[
        str, Parameter(name=["--out", "-o"], help="The .json file, or the folder, of what is found.")
    ] = "search.json",
    resume: Annotated[bool, Parameter(negative="", help="Go on with the search in --out.")] = False,
    context: Annotated[int, Parameter(help="Tokens of a window.")] = 512,
    tokens: Annotated[int, Parameter(help="Tokens to search on.")] = 2048,
    held_out_tokens: Annotated[int, Parameter(help="Tokens to read at the end.")] = 8192,
    batch: Annotated[int, Parameter(help="Windows read at once.")] = 1,
    memory: Annotated[int, Parameter(help="MB of streams kept where programs part.")] = 1024,
    common: Keeping = KEEPING,
) -> None:
    """The best program under a budget, on your text.

    The first half of the text is searched on, the second half decides nothing: the best program and the whole model
    are read on it at the end. Both figures are given, with the difference from the whole model and its 95 % interval.
    A search that is stopped goes on with --resume and ends as if it had not been.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    """
    text = read_text(data)
    checkpoint = deepen.open(model)
    path = file_of(out)
    with progress(f"{method} {budget}", candidates, "candidates") as step:
        try:
            found = deepen.search(
                checkpoint,
                text,
                budget=budget,
                method=method,
                moves=[name.strip() for name in moves.split(",") if name.strip()],
                candidates=candidates,
                minutes=minutes,
                seed=seed,
                context=context,
                tokens=tokens,
                held_out_tokens=held_out_tokens,
                batch=batch,
                memory=memory * 10**6,
                device=common.torch_device(),
                dtype=common.torch_dtype(),
                path=path,
                resume=resume,
                report=reporter(step),
            )
        except KeyboardInterrupt:
            note(f"what was evaluated is kept in {path}; go on with the same command and --resume")
            raise
    if not give(common, "search", {"model": model, "data": data, "out": str(path)} | found.to_json()):
        print(describe(found, str(path)))


def file_of(out: str) -> Path:
    """The file that `--out` names: itself, or `search.json` in a folder, which is made.

    Raises:
        SaveError: the folder cannot be made.
    """
    path = Path(out)
    if path.suffix == ".json" and not path.is_dir():
        return path
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"cannot make {path}: {error.strerror}; name another folder with --out") from error
    return path / "search.json"


def counter(step: Callable[[int], None]) -> Callable[[Problem], None]:
    """Tells a progress bar how many candidates were evaluated since the last round."""
    known = 0

    def report(problem: Problem) -> None:
        nonlocal known
        step(len(problem.asked) - known)
        known = len(problem.asked)

    return report


def reporter(step: Callable[[int], None]) -> Callable[[Problem], None]:
    """Counts the candidates and says so whenever a better program is found."""
    count, shown = counter(step), ""

    def report(problem: Problem) -> None:
        nonlocal shown
        count(problem)
        best = problem.best()
        if best is not None and best.program != shown:
            shown = best.program
            note(f"after {len(problem.asked)}: loss {best.nll:.1f} nats, cost {amount(best.cost)}: {shown}")

    return report


def describe(found: Found, path: str) -> str:
    """The result as text for people."""
    unit = found.budget.split("=")[0]
    head = [
        ("best program", found.program),
        (f"cost ({unit})", f"{amount(found.cost)} of {amount(found.whole_cost)}, at most {amount(found.limit)}"),
        ("candidates", f"{found.candidates}{'' if found.ended else ', all that were allowed'}"),
        ("visits run", f"{found.visits[0]}, separate passes {found.visits[1]}"),
    ]
    rows = [("text", "whole", "best", "best / whole", "95 % interval", "windows")]
    rows += [_row(name, part) for name, part in (("searched", found.searched), ("held out", found.held_out))]
    points = [("cost", "loss", "program"), *((amount(p.cost), f"{p.nll:.1f}", p.program) for p in found.frontier)]
    lines = [pairs(head), "", "perplexity", table(rows), "", "frontier (nats on the searched text)"]
    lines.append(table([(program, cost, loss) for cost, loss, program in points[: LISTED + 1]]))
    if len(points) > LISTED + 1:
        lines.append(f"... and {len(points) - LISTED - 1} more programs")
    return "\n".join([*lines, "", f"written: {path}"])


def _row(name: str, part: Part) -> tuple[str, ...]:
    import math

    moved = part.difference
    low, high = (math.exp(min(bound, 700.0)) for bound in (moved.low, moved.high))
    return (
        name,
        amount(part.whole.perplexity),
        amount(part.best.perplexity),
        f"x{moved.ratio:.4g}",
        f"{low:.4g} to {high:.4g}",
        f"{moved.windows}",
    )
