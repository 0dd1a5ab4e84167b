"""`deepen train`: train a stack as a recipe says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, note, pairs, print_json
from deepen.cli.progress import Step, progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.train.log import Entry
    from deepen.train.recipe_run import Outcome

# Lines of the training loss that a run prints, at most.
LINES = 20
NAMES = {"bits_per_byte": "bits per byte", "exact_match": "exact match"}


def train(
    recipe: str,
    /,
    *,
    output: Annotated[
        str, Parameter(name=["--output", "-o"], help="A folder that does not exist yet; the recipe's name by default.")
    ] = "",
    set_: Annotated[
        tuple[str, ...], Parameter(name="--set", negative="", help="Change a field: train.steps=100, task.source=kjv.")
    ] = (),
    resume: Annotated[bool, Parameter(negative="", help="Go on with the run of the same output.")] = False,
    common: Common = DEFAULT,
) -> None:
    """Train a stack as a recipe says, and write it as a folder that deepen run opens.

    While it runs, log and state are in DIR.training; a run that was stopped or killed goes on with --resume.
    Several processes share it under torchrun: torchrun --nproc-per-node 4 -m deepen train RECIPE.

    Parameters
    ----------
    recipe
        A YAML file with the parts stack, task, train and, if wanted, grow, depth and log.
    """
    from deepen.train.distributed import joined
    from deepen.train.recipe_file import RecipeFile
    from deepen.train.recipe_run import run_recipe
    from deepen.train.sample import sample

    if common.dtype != "auto":
        raise UsageError("--dtype is not about training a recipe: give --set train.dtype=bfloat16 or float32")
    read = RecipeFile.read(recipe, set_)
    place = Path(output or Path(recipe).stem)
    device = common.torch_device()
    with joined(device, read.train.parallel) as processes:
        if not processes.first:
            run_recipe(read, place, resume=resume, device=device, processes=processes)
            return
        with progress(f"training {place}", read.train.steps, "steps") as step:
            try:
                outcome = run_recipe(
                    read,
                    place,
                    resume=resume,
                    device=device,
                    report=reporter(step, read.task.about),
                    processes=processes,
                )
            except KeyboardInterrupt:
                note(f"a state that was saved is in {place}.training; go on with the same command and --resume")
                raise
    text = None
    if outcome.data.tokenizer is not None:
        text = sample(outcome.stack, outcome.data.tokenizer)
    if common.json:
        print_json({"output": str(place)} | outcome.to_json() | ({} if text is None else {"sample": text}))
        return
    print(describe(outcome, place))
    if text is not None:
        print(f"\n{text}")


def reporter(step: Step, about: str) -> Callable[[Entry, int], None]:
    """Counts the steps, and says the loss every now and then and whenever the held-out data was looked at."""
    first: int | None = None

    def report(entry: Entry, steps: int) -> None:
        nonlocal first
        if first is None:
            first = entry.step
            note(f"{steps - entry.step + 1} of {steps} steps: {about}")
        # of a resumed run only what is left is counted, or the rate would be that of steps it did not do
        step(1, steps - first + 1)
        if entry.held_out is not None or entry.step % max(1, steps // LINES) == 0:
            looked = "" if entry.held_out is None else f", held out {entry.held_out:.4f}{_told(entry.measures or {})}"
            rate = f"{amount(entry.tokens_per_second)} tokens/s"
            note(f"step {entry.step}/{steps}: loss {entry.loss:.4f}{looked}, {rate}")

    return report


def _told(measures: Mapping[str, float]) -> str:
    return "".join(
        f", {NAMES.get(name, name)} {value:.4f}"
        for name, value in measures.items()
        if name != "loss" and "." not in name
    )


def describe(outcome: Outcome, place: Path) -> str:
    """The result as text for people."""
    config = outcome.stack.config
    trained = f"{amount(outcome.steps)} steps, {amount(outcome.targets)} targets, {amount(outcome.flops)}FLOPs"
    rows = [
        ("program", config.program or ""),
        ("trained", f"{amount(outcome.parameters)} parameters, {trained}, {outcome.seconds:.0f} s"),
    ]
    for split, measures in outcome.splits.items():
        rows.append((split.replace("_", " "), f"loss {measures['loss']:.4f}{_told(measures)}"))
    if (order := outcome.peers.get("ngram_order")) is not None:
        bits = outcome.peers["ngram_bits_per_byte"]
        rows.append(("n-gram", f"bits per byte {bits:.4f} (Kneser-Ney, order {order:.0f} chosen on dev)"))
    return pairs([*rows, ("written", str(place))])
