"""`deepen compare`: variants of a recipe under one budget, seed by seed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, called, note, plain, print_json, table
from deepen.cli.progress import progress
from deepen.errors import UsageError

KEPT = "compare.json"


def compare(
    suite: str,
    /,
    *,
    output: Annotated[
        str, Parameter(name=["--output", "-o"], help="A folder for the results; the suite's name by default.")
    ] = "",
    workers: Annotated[int, Parameter(help="Runs at once; the cores are shared out.")] = 1,
    models: Annotated[bool, Parameter(negative="", help="Keep the trained stacks.")] = False,
    ray: Annotated[str, Parameter(help="Run on the Ray cluster at this address; local starts one here.")] = "",
    common: Common = DEFAULT,
) -> None:
    """Train variants of a recipe under one budget and say which is better, with intervals over seeds.

    A suite that was stopped or killed goes on with the same command. deepen report DIR makes a page of the results.

    Parameters
    ----------
    suite
        A YAML file with a recipe, a budget, seeds and variants.
    """
    from deepen.compare.compare import compare as run
    from deepen.compare.suite import Suite
    from deepen.report.kept import write_kept

    if workers < 1:
        raise UsageError(f"--workers {workers}: expected 1 or more")
    read = Suite.read(suite)
    place = Path(output or Path(suite).stem)
    with progress(f"comparing in {place}", len(read.variants) * len(read.seeds), "runs") as step:
        first: int | None = None

        def report(name: str, ended: int, runs: int) -> None:
            nonlocal first
            first = ended if first is None else first
            note(f"{ended}/{runs} runs: {name}")
            step(1, runs - first + 1)

        try:
            found = run(
                read, suite, place, workers=workers, models=models, ray=ray or None, report=report
            )  # fmt: skip
        except KeyboardInterrupt:
            note(f"the runs so far are in {place}; go on with the same command")
            raise
    write_kept(place / KEPT, "compare", shlex.join(["deepen", *called.get()]), plain(found))
    if common.json:
        print_json({"output": str(place), **found})
    else:
        print(describe(found))
        print(f"\nkept in {place}; a page of it: deepen report {place}")


def describe(found: Mapping[str, Any]) -> str:
    """The result as text for people."""
    summary = found["summary"]
    compared = {each["name"]: each for each in summary["comparisons"]}
    rows = [["variant", summary["measure"].replace("_", " "), "parameters", "FLOPs/token", "steps", "seconds",
             f"less {summary['baseline']}", "95 % interval", "seeds", "verdict"]]  # fmt: skip
    for each in summary["variants"]:
        other = compared.get(each["name"])
        rows.append([
            each["name"],
            f"{each['mean']:.4f}",
            amount(each["parameters"]),
            amount(each["flops_per_token"]),
            str(each["steps"]),
            f"{each['seconds']:.0f}",
            "" if other is None else f"{other['mean']:+.4f}",
            _interval(other),
            str(len(each["values"])),
            "baseline" if each["name"] == summary["baseline"] else "" if other is None else other["verdict"],
        ])  # fmt: skip
    lines = [table(rows)]
    lines += list(_reached(summary))
    lines += [f"{each['name']}, seed {each['seed']}: {each['why']}" for each in summary["failed"]]
    if summary["uncommitted"]:
        lines.append("made from a source tree with uncommitted changes")
    return "\n".join(lines)


def _reached(summary: Mapping[str, Any]) -> Iterator[str]:
    for each in summary["comparisons"]:
        share = each["reach"]["flops"]
        if share["mean"] is not None:
            bounds = "" if share["low"] is None else f" ({share['low']:.3f} to {share['high']:.3f})"
            got = f"{share['mean']:.3f}{bounds} of its FLOPs"
            yield f"{each['name']} was as good as {summary['baseline']} at its end after {got}"


def _interval(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return ""
    if compared["low"] is None:
        return "one seed, none"
    return f"{compared['low']:+.4f} to {compared['high']:+.4f}"
