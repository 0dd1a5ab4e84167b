"""`deepen check-scaling`: whether a parametrisation keeps training alike over depth, measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from deepen.cli.data import read_text
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import plain, print_json, table
from deepen.cli.packaged import TEXT_NAME, packaged_text
from deepen.cli.progress import progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.stack.config import StackConfig
    from deepen.train.scaling import Curve


def check_scaling(
    recipe: str,
    /,
    *,
    depths: Annotated[str, Parameter(help="Layers, two or more numbers.")] = "4,8,16,32,64",
    parametrisation: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Rules to compare; standard, depth-mup and completep by default."),
    ] = (),
    steps: Annotated[int, Parameter(help="Updates of a run.")] = 10,
    rates: Annotated[str, Parameter(help="Learning rates; features are looked at with the lowest.")] = "3e-4,1e-3,3e-3",
    seeds: Annotated[int, Parameter(help="Runs of each kind.")] = 3,
    data: Annotated[str, Parameter(help=f"A UTF-8 text file, read as bytes; {TEXT_NAME} by default.")] = "",
    batch: Annotated[int, Parameter(help="Windows of an update.")] = 8,
    context: Annotated[int, Parameter(help="Bytes of a window.")] = 32,
    output: Annotated[
        str, Parameter(name=["--output", "-o"], help="A new folder that gets scaling.json and index.html.")
    ] = "",
    common: Common = DEFAULT,
) -> None:
    """Whether a parametrisation keeps training alike over depth.

    Stacks of each depth are trained for a few steps. Printed is how far the last stream moved on a batch that was not
    trained on, its slope over depth in log-log scale with a 95 % interval over seeds, and the learning rate of the
    lowest loss at each depth. A slope between -0.1 and 0.1 is called flat. The base depth is the smallest depth, where
    the recipe names no other.

    Parameters
    ----------
    recipe
        A YAML file: the configuration of a stack, or a recipe whose key `stack` holds one. Its layers do not matter.
    """
    chosen = tuple(dict.fromkeys(parametrisation)) or ("standard", "depth-mup", "completep")
    layers, learning = numbers(depths, "depths", int), numbers(rates, "rates", float)
    if len(layers) < 2:
        raise UsageError(f"--depths {depths}: a slope needs two depths or more, such as 4,16,64")
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise UsageError(f"--{name} {value}: expected 1 or more")
    config = read_stack(Path(recipe))
    text = read_text(data) if data else packaged_text()
    from deepen.checkpoint.atomic import atomic_folder
    from deepen.train import scaling

    runs = len(chosen) * len(layers) * len(learning) * seeds
    with atomic_folder(Path(output)) if output else nullcontext() as folder:
        with progress("training", runs, "runs") as step:
            curves = scaling.check_scaling(
                config,
                scaling.reading(text, config, batch, context),
                rules=chosen,
                depths=layers,
                rates=learning,
                steps=steps,
                seeds=seeds,
                device=common.torch_device(),
                done=step,
            )
        document = {
            "recipe": recipe, "data": data or TEXT_NAME, "width": config.width, "depths": layers, "rates": learning,
            "steps": steps, "seeds": seeds, "batch": batch, "context": context,
            "curves": [to_json(curve) for curve in curves],
        }  # fmt: skip
        if folder is not None:
            from deepen.cli.check_scaling_page import write_files

            write_files(folder, plain(document), curves)
    if common.json:
        print_json(document)
    else:
        print(report(curves, layers))


def numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    """Different positive numbers, ascending.

    Raises:
        UsageError: anything else.
    """
    example = "4,16,64" if kind is int else "3e-4,1e-3"
    try:
        found = sorted({kind(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise UsageError(f"--{name} {text}: expected positive numbers such as {example}")
    return found


def read_stack(path: Path) -> StackConfig:
    """The stack of a recipe, or the file as one.

    Raises:
        UsageError: names the file and the key.
    """
    from deepen.stack.config import StackConfig
    from deepen.stack.tables import read_tables

    inner = read_tables(path).get("stack")
    if not isinstance(inner, dict):
        return StackConfig.read(path)
    try:
        return StackConfig.read(inner)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def to_json(curve: Curve) -> dict[str, Any]:
    slope = curve.slope
    return {
        "parametrisation": curve.rule,
        "options": curve.options,
        "changes": curve.changes,
        "slope": {"value": slope.value, "low": slope.low, "high": slope.high, "flat": slope.flat},
        "losses": curve.losses,
        "best_rates": curve.best,
    }


def report(curves: Sequence[Curve], depths: Sequence[int]) -> str:
    """Two tables: the changes with their slopes, and the best rates."""
    heading = ["depth", *map(str, depths)]
    changed = [[*heading, "slope", "95 % interval", ""]]
    rated = [heading]
    for curve in curves:
        interval = slope_text(curve)
        changed.append([curve.rule, *(f"{middle(each):.3g}" for each in curve.changes), *interval])
        rated.append([curve.rule, *("-" if math.isnan(each) else f"{each:g}" for each in curve.best)])
    return (
        f"How far the last stream moved, at the lowest rate:\n{table(changed)}\n\n"
        f"The rate of the lowest loss:\n{table(rated)}"
    )


def slope_text(curve: Curve) -> tuple[str, str, str]:
    """The slope, its interval, and what that is called."""
    slope = curve.slope
    if math.isnan(slope.value):
        return "-", "-", "lost"
    interval = "one seed" if math.isnan(slope.low) else f"{slope.low:.3f} to {slope.high:.3f}"
    return f"{slope.value:.3f}", interval, "flat" if slope.flat else "drifts"


def middle(values: Sequence[float]) -> float:
    """The geometric mean; NaN where a value is missing."""
    if not all(0 < each < math.inf for each in values):
        return math.nan
    return math.exp(sum(map(math.log, values)) / len(values))
