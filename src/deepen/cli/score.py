"""`deepen score`: which layers matter, by several published scores side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import note, print_json, program_text, table
from deepen.cli.progress import progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.probe.scores.base import Scores

# What a program never is: it holds a number.
NAME = re.compile(r"[a-z_]+")


def score(
    model: str,
    /,
    *what: str,
    data: Annotated[str, Parameter(help="A UTF-8 text file.")],
    context: Annotated[int, Parameter(help="Tokens of a window.")] = 512,
    tokens: Annotated[int | None, Parameter(help="Tokens of the text to read; all by default.")] = None,
    batch: Annotated[int, Parameter(help="Windows read at once.")] = 1,
    tower: Annotated[str, Parameter(help="The tower to score, where a model has several.")] = "",
    details: Annotated[
        bool, Parameter(negative="", help="Also print what a score gives beside its main value.")
    ] = False,
    plot: Annotated[str, Parameter(help="Draw the scores by depth to this .svg or .png file.")] = "",
    common: Common = DEFAULT,
) -> None:
    """Score every visit of a program on a text: which layers matter.

    Scores that only watch the stream share one pass and are read when none is named. `deepen methods --family score`
    lists all of them with their costs; `all` names all. Rank 1 is the visit that matters most.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    what
        A program, the model's own when none is given, and names of scores.
    """
    from deepen.program import read_program

    if plot:
        from deepen.probe.scores.figure import require_format

        require_format(plot)
    program, names = sort_out(what)
    text = read_text(data)
    checkpoint = deepen.open(model)
    if program:
        checkpoint = checkpoint.apply(read_program(program, common.form))
    checkpoint.require_executable()
    note(f"loading {program_text(checkpoint)}")
    with progress("scoring", None, "windows") as step:
        found = deepen.score(
            checkpoint, *names, text=text, tower=tower, context=context, tokens=tokens, batch=batch,
            device=common.torch_device(), dtype=common.torch_dtype(), progress=step,
        )  # fmt: skip
    if plot:
        from deepen.probe.scores.figure import draw

        draw(found, plot)
    if common.json:
        print_json({"model": model, "data": data, **found.to_json(), "program": program_text(checkpoint)})
    else:
        print(report(found, details))


def sort_out(what: Sequence[str]) -> tuple[str, list[str]]:
    """The program, if any, and the names of scores; `all` stands for all names.

    Raises:
        UsageError: an unknown score, or more than one program.
    """
    from deepen.probe.scores.score import choose
    from deepen.registry import methods

    names = [word for word in what if NAME.fullmatch(word)]
    programs = [word for word in what if word not in names]
    if len(programs) > 1:
        raise UsageError(
            f"expected one program, got {len(programs)}: {', '.join(map(repr, programs))}; score one at a time"
        )
    if "all" in names:
        names = [found.name for found in methods("score")]
    choose(names)
    return "".join(programs), names


def report(scores: Scores, details: bool = False) -> str:
    """The scores as text for people: the table, what its columns mean, what was left out, and what it took."""
    pieces = []
    if shown := [name for name in scores.columns if details or "." not in name]:
        pieces += [table(scores.cells(shown), left=0), ""]
        width = max(map(len, shown))
        pieces += [f"{name.ljust(width)}  {scores.columns[name].meaning}" for name in shown]
    pieces += [f"{name}: {reason}" for name, reason in scores.notes.items()]
    shared: dict[tuple[int, float], list[str]] = {}
    for name, calls in scores.calls.items():
        shared.setdefault((calls, scores.seconds[name]), []).append(name)
    spent = "; ".join(
        f"{calls} in {seconds:.3g} s for {', '.join(names)}" for (calls, seconds), names in shared.items()
    )
    pieces += ["", f"{scores.tokens} tokens in {scores.windows} windows; forward calls: {spent}"]
    return "\n".join(pieces)
