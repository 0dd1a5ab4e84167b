"""`deepen eval`: how well one or more programs of a model predict a text, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, note, print_json, program_text, table
from deepen.cli.progress import progress

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.probe.distance import Distance
    from deepen.probe.perplexity import Evaluation


@dataclass(frozen=True)
class Reading:
    """How a text is read; see the options of the command."""

    text: str
    context: int
    tokens: int | None
    batch: int
    device: str
    dtype: str | None


def evaluate(
    model: str,
    /,
    *programs: str,
    data: Annotated[str, Parameter(help="A UTF-8 text file.")],
    context: Annotated[int, Parameter(help="Tokens of a window.")] = 512,
    tokens: Annotated[int | None, Parameter(help="Tokens of the text to read; all by default.")] = None,
    batch: Annotated[int, Parameter(help="Windows read at once.")] = 1,
    common: Common = DEFAULT,
) -> None:
    """Perplexity and bits per byte of one or more programs on a text.

    The text is cut into windows that do not overlap; the first token of a window is not scored. A model without a
    causal head is compared with its identity program instead: KL of its predictions, or the relative distance of its
    hidden states.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    programs
        Programs to compare; the model's own when none is given.
    """
    from deepen.program import read_program

    text = read_text(data)
    reading = Reading(text, context, tokens, batch, common.torch_device(), common.torch_dtype())
    checkpoint = deepen.open(model)
    chosen = [checkpoint.apply(read_program(program, common.form)) for program in programs] or [checkpoint]
    for candidate in chosen:
        candidate.require_executable()
    results = measure(checkpoint, chosen, reading)
    if common.json:
        rows = [{"program": program_text(ck), **found.to_json()} for ck, found in zip(chosen, results, strict=True)]
        print_json({"model": model, "data": data, "results": rows})
    else:
        print(report([program_text(ck) for ck in chosen], results))


def measure(
    checkpoint: Checkpoint, chosen: Sequence[Checkpoint], reading: Reading
) -> Sequence[Evaluation] | Sequence[Distance]:
    """Evaluates the programs one after the other; the weights are read from the files once."""
    from dataclasses import replace

    from deepen.probe.distance import distance
    from deepen.probe.once import read_once
    from deepen.probe.perplexity import is_causal, perplexity

    tokenizer = checkpoint.tokenizer()
    shared = read_once(checkpoint)
    options = {"context": reading.context, "tokens": reading.tokens, "batch": reading.batch}
    reference = None
    evaluations: list[Evaluation] = []
    distances: list[Distance] = []
    for at, candidate in enumerate(chosen):
        title = program_text(candidate)
        note(f"loading {at + 1}/{len(chosen)}: {title}")
        model = replace(candidate, source=shared.source).load(dtype=reading.dtype, device=reading.device)
        if reference is None and not is_causal(model):
            reference = shared.apply(shared.identity).load(dtype=reading.dtype, device=reading.device)
        with progress(title, None, "windows") as step:
            if reference is None:
                evaluations.append(perplexity(model, tokenizer, reading.text, progress=step, **options))
            else:
                distances.append(distance(model, reference, tokenizer, reading.text, progress=step, **options))
    return evaluations or distances


def report(programs: Sequence[str], results: Sequence[Evaluation] | Sequence[Distance]) -> str:
    """The results as a table for people."""
    from deepen.probe.distance import Distance

    rows: list[tuple[str, ...]] = []
    for program, found in zip(programs, results, strict=True):
        if isinstance(found, Distance):
            name = "KL (nats)" if found.kind == "kl" else "relative distance"
            heading = ("program", name, "same choice", "predictions", "tokens/s")
            same = "-" if found.agreement is None else f"{found.agreement:.1%}"
            cells = (program, f"{found.value:.4g}", same, f"{found.predictions}", f"{found.tokens_per_second:.4g}")
        else:
            heading = ("program", "perplexity", "bits/byte", "tokens", "tokens/s")
            rate = f"{found.tokens_per_second:.4g}"
            cells = (program, amount(found.perplexity), f"{found.bits_per_byte:.4f}", f"{found.tokens}", rate)
        rows = [heading, *rows[1:], cells]
    return table(rows)
