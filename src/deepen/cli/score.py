"""`deepen score`: which layers matter, by several published scores side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import KEEPING, Keeping
from deepen.cli.output import give, note, program_text, table
from deepen.cli.progress import progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.probe.memories import Memories
    from deepen.probe.scores.base import Scores

MEMORY_COLUMNS = (
    "active     memories with a coefficient other than 0, a token",
    "effective  as many memories of one size would write as unevenly, a token",
    "agreement  share of memories that speak for the token behind their top trigger",
)
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
    memories: Annotated[str, Parameter(help="List neurons of these visits, such as 3,5, instead of scores.")] = "",
    neurons: Annotated[int, Parameter(help="With --memories: neurons of a visit.")] = 5,
    common: Keeping = KEEPING,
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
    visits = visits_of(memories, names, plot)
    if neurons < 1:
        raise UsageError(f"--neurons {neurons}: expected at least 1")
    text = read_text(data)
    checkpoint = deepen.open(model)
    if program:
        checkpoint = checkpoint.apply(read_program(program, common.form))
    checkpoint.require_executable()
    reading = {
        "text": text, "tower": tower, "context": context, "tokens": tokens, "batch": batch,
        "device": common.torch_device(), "dtype": common.torch_dtype(),
    }  # fmt: skip
    note(f"loading {program_text(checkpoint)}")
    if visits:
        read = list_memories(checkpoint, visits, neurons, reading)
        document = {
            "model": model, "data": data, "program": program_text(checkpoint), "tokens": tokens, "context": context,
            "memories": [each.to_json() for each in read],
        }  # fmt: skip
        if not give(common, "score", document):
            print(memory_report(read))
        return
    with progress("scoring", None, "windows") as step:
        found = deepen.score(checkpoint, *names, progress=step, **reading)
    if plot:
        from deepen.probe.scores.figure import draw

        draw(found, plot)
    document = {"model": model, "data": data, **found.to_json(), "program": program_text(checkpoint)}
    if not give(common, "score", document):
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


def visits_of(memories: str, names: Sequence[str], plot: str) -> list[int]:
    """The visits whose memories are asked for.

    Raises:
        UsageError: not numbers, or scores are asked for as well.
    """
    if not memories:
        return []
    if names or plot:
        raise UsageError("--memories lists neurons instead of scores; leave out the names of scores and --plot")
    if not re.fullmatch(r"\d+(,\d+)*", memories):
        raise UsageError(f"--memories {memories!r}: expected numbers of visits such as 3,5")
    return [int(visit) for visit in memories.split(",")]


def list_memories(
    checkpoint: Checkpoint, visits: Sequence[int], neurons: int, options: Mapping[str, Any]
) -> list[Memories]:
    """The memories of these visits, read in one pass."""
    from deepen.probe.memories import memories
    from deepen.probe.scores.reading import open_reading

    reading = open_reading(checkpoint, **options)
    with progress("reading", len(reading.windows), "windows") as step:
        reading.step = step
        return memories(reading, visits, neurons)


def memory_report(read: Sequence[Memories]) -> str:
    """A table of the visits, then neurons with the tokens they speak for and the texts that make them fire.

    What is not printable is escaped.
    """
    rows = [("visit", "layer", "memories", "active", "effective", "agreement")]
    for each in read:
        agreement = "-" if each.agreement is None else f"{each.agreement:.4f}"
        rows.append(
            (str(each.visit), each.layer, str(each.count), f"{each.active:.4g}", f"{each.effective:.4g}", agreement)
        )
    lines = [table(rows, left=0), "", *MEMORY_COLUMNS, ""]
    for neuron in (neuron for each in read for neuron in each.neurons):
        spoken = " ".join(map(repr, neuron.speaks))
        lines.append(f"visit {neuron.visit} neuron {neuron.neuron}  speaks for {spoken}")
        lines += [f"  {size:9.4g}  {text!r}" for text, size in neuron.fires]
    return "\n".join(lines)


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
