"""`deepen eval`: programs of a model side by side: on a text, on tasks of lm-eval, and how fast they are."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.eval_table import Row, report
from deepen.cli.options import KEEPING, Keeping
from deepen.cli.output import give, note, program_text
from deepen.cli.progress import progress
from deepen.errors import DataError, FamilyError, UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.probe.trie import Evaluator, Visits

# Tokens that --speed generates: this many, and at most half of --context.
NEW = 32


@dataclass(frozen=True)
class Reading:
    """How a text is read; see the options of the command."""

    text: str
    context: int
    tokens: int | None
    batch: int
    device: str
    dtype: str | None

    @property
    def options(self) -> dict[str, Any]:
        """As `perplexity` takes them."""
        return {"context": self.context, "tokens": self.tokens, "batch": self.batch}


def evaluate(
    model: str,
    /,
    *programs: str,
    data: Annotated[str | None, Parameter(help="A UTF-8 text file.")] = None,
    tasks: Annotated[str, Parameter(help="Tasks of lm-eval: names and task files (.yaml), with commas.")] = "",
    speed: Annotated[bool, Parameter(negative="", help="Time reading and generating; peak memory.")] = False,
    limit: Annotated[int | None, Parameter(help="Documents of a task to read; all by default.")] = None,
    shots: Annotated[int | None, Parameter(help="Examples in the prompt of a task; its own number by default.")] = None,
    context: Annotated[int, Parameter(help="Tokens of a window; of --speed, prompt and answer.")] = 512,
    tokens: Annotated[int | None, Parameter(help="Tokens of the text to read; all by default.")] = None,
    batch: Annotated[int, Parameter(help="Windows, or prompts of a task, read at once.")] = 1,
    seed: Annotated[int, Parameter(help="Of intervals and of the examples of tasks.")] = 0,
    common: Keeping = KEEPING,
) -> None:
    """How good and how fast one or more programs are: on a text, on tasks of lm-eval, in tokens a second.

    --data gives perplexity and bits per byte, and for each further program the difference from the first with its
    95 % interval (bootstrap over windows, paired). The text is cut into windows that do not overlap; the first token
    of a window is not scored. A model without a causal head is compared with its identity program instead: KL of its
    predictions, or the relative distance of its hidden states.

    --tasks needs deepen[lm-eval]. --speed times generation with a batch of 1.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    programs
        Programs to compare; the model's own when none is given.
    """
    from deepen.program import read_program

    if data is None and not tasks and not speed:
        raise UsageError("nothing to evaluate: give --data FILE, --tasks NAME or --speed")
    if not tasks and (limit is not None or shots is not None):
        raise UsageError("--limit and --shots are about tasks: give --tasks NAME or leave them out")
    text = None if data is None else read_text(data)
    device, dtype = common.torch_device(), common.torch_dtype()
    checkpoint = deepen.open(model)
    chosen = [checkpoint.apply(read_program(program, common.form)) for program in programs] or [checkpoint]
    for candidate in chosen:
        candidate.require_executable()
    loaded = read_tasks(tasks)
    rows = [Row(program_text(candidate)) for candidate in chosen]
    visits = None
    if text is not None:
        visits = measure(checkpoint, chosen, rows, Reading(text, context, tokens, batch, device, dtype), seed)
    for at, (candidate, row) in enumerate(zip(chosen, rows, strict=True)):
        if not loaded and not speed:
            break
        # the model before this one would count as memory of this one
        gc.collect()
        note(f"loading {at + 1}/{len(chosen)}: {row.program}")
        ready = candidate.load(dtype=dtype, device=device)
        if speed:
            new = min(NEW, context // 2)
            row.speed = deepen.speed(ready, prompt=context - new, new=new)
        if loaded:
            row.tasks = deepen.evaluate_tasks(
                ready, loaded, tokenizer=candidate.tokenizer(), limit=limit, shots=shots, batch=batch, seed=seed
            )
        del ready
    document = {"model": model, "data": data, "results": [row.to_json() for row in rows]}
    if visits is not None:
        document["visits"] = {"run": visits.run, "separate": visits.separate}
    if not give(common, "eval", document):
        print(report(rows, visits))


def read_tasks(tasks: str) -> list[Any]:
    """The tasks that `--tasks` names, their data read."""
    if not tasks:
        return []
    from deepen.probe.tasks import load_tasks

    note(f"reading tasks: {tasks}")
    return load_tasks([name.strip() for name in tasks.split(",") if name.strip()])


def measure(
    checkpoint: Checkpoint, chosen: Sequence[Checkpoint], rows: Sequence[Row], reading: Reading, seed: int
) -> Visits | None:
    """Evaluates the programs on the text: together where they can share visits, else one after the other.

    Returns:
        The visits they took together; None when nothing was shared.
    """
    from deepen.probe.interval import paired_difference
    from deepen.probe.perplexity import Evaluation
    from deepen.probe.trie import Evaluator

    evaluator = None
    if len(chosen) > 1 and len(checkpoint.depth) == 1:
        note(f"loading {program_text(checkpoint)} for {len(chosen)} programs")
        try:
            evaluator = Evaluator(checkpoint, device=reading.device, dtype=reading.dtype)
        except FamilyError:
            note("programs of this model are evaluated one after the other")
    if evaluator is None:
        one_by_one(checkpoint, chosen, rows, reading)
    else:
        together(evaluator, chosen, rows, reading)
    for row in rows[1:]:
        if isinstance(row.found, Evaluation) and isinstance(first := rows[0].found, Evaluation):
            row.difference = paired_difference(row.found, first, seed=seed)
    return None if evaluator is None else evaluator.visits


def together(evaluator: Evaluator, chosen: Sequence[Checkpoint], rows: Sequence[Row], reading: Reading) -> None:
    """One pass for all programs, in which what they begin with is run once.

    Raises:
        DataError: logits that are not finite, with the program that has them.
    """
    with progress(f"{len(chosen)} programs", None, "windows") as step:
        found = evaluator.evaluate(
            [candidate.program for candidate in chosen], reading.text, progress=step, **reading.options
        )
    for row, evaluation in zip(rows, found, strict=True):
        if evaluation.nll == float("inf"):
            raise DataError(f"{row.program}: the logits are not finite on this text; compute in --dtype float32")
        row.found, row.shared = evaluation, True


def one_by_one(checkpoint: Checkpoint, chosen: Sequence[Checkpoint], rows: Sequence[Row], reading: Reading) -> None:
    """One program after the other; the weights are read from the files once."""
    from deepen.probe.distance import distance
    from deepen.probe.once import read_once
    from deepen.probe.perplexity import is_causal, perplexity

    tokenizer = checkpoint.tokenizer()
    shared = read_once(checkpoint)
    reference = None
    for at, (candidate, row) in enumerate(zip(chosen, rows, strict=True)):
        note(f"loading {at + 1}/{len(chosen)}: {row.program}")
        model = replace(candidate, source=shared.source).load(dtype=reading.dtype, device=reading.device)
        if reference is None and not is_causal(model):
            reference = shared.apply(shared.identity).load(dtype=reading.dtype, device=reading.device)
        with progress(row.program, None, "windows") as step:
            if reference is None:
                row.found = perplexity(model, tokenizer, reading.text, progress=step, **reading.options)
            else:
                row.found = distance(model, reference, tokenizer, reading.text, progress=step, **reading.options)
