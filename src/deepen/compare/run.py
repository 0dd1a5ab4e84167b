"""One run of a suite: trains a recipe and writes what came of it as one table.

    FOLDER/recipe.yaml        what to train
    FOLDER/model.training/    log and state while it runs; a run that was killed goes on from there
    FOLDER/run.json           the result, written last

A loss that is not finite is a result too: `failed` says where.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepen.checkpoint.atomic import atomic_file
from deepen.compare.budget import TRAINING
from deepen.compare.record import machine, source, versions
from deepen.probe.speed import largest_resident
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack
from deepen.train.length import spent_flops, stages_of, step_tokens
from deepen.train.recipe_file import RecipeFile
from deepen.train.recipe_run import LOG, Outcome, run_recipe
from deepen.train.stops import NotFinite

RECIPE, RUN, MODEL = "recipe.yaml", "run.json", "model"


def execute(folder: Path, *, models: bool = False) -> dict[str, Any]:
    """Runs what the folder says, from where an earlier process got to, and writes the result.

    Waits for another process that runs the same; where that has written a result, it is taken.

    Args:
        folder: with a recipe.
        models: keep the trained stack.

    Raises:
        DeepenError: the recipe cannot be run; nothing is written.
    """
    with (folder / RECIPE).open(encoding="utf-8") as held:
        # a run of a suite that was killed may still be saving its state
        fcntl.flock(held, fcntl.LOCK_EX)
        return _execute(folder, models)


def _execute(folder: Path, models: bool) -> dict[str, Any]:
    if (folder / RUN).is_file():
        return json.loads((folder / RUN).read_text(encoding="utf-8"))
    recipe, model = RecipeFile.read(folder / RECIPE), folder / MODEL
    # a stack without a result was written by a process that was killed before its last line: its state is gone
    shutil.rmtree(model, ignore_errors=True)
    resume = any(model.with_name(f"{MODEL}.training").glob("step-*"))
    if not resume:
        shutil.rmtree(model.with_name(f"{MODEL}.training"), ignore_errors=True)
    try:
        outcome = run_recipe(recipe, model, resume=resume, models=models, name=folder.name)
    except NotFinite as error:
        found = {"failed": str(error), **_made()}
    else:
        found = record(outcome, _lines(model / LOG))
    with atomic_file(folder / RUN) as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    if not models:
        shutil.rmtree(model, ignore_errors=True)
    return found


def record(outcome: Outcome, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run came to, as plain values.

    Args:
        outcome: of the run.
        log: its lines, all of them.
    """
    recipe, stack, config = outcome.recipe, outcome.stack, outcome.stack.config
    first = outcome.data.batch(0, recipe.train.batch, recipe.train.seed)
    # growth is counted from the stack that the run began with
    start = Stack(recipe.stack_config(outcome.data.stack)) if recipe.grow else stack
    positions = step_tokens(start, 1, first.inputs.shape[-1])
    stages = stages_of(recipe, outcome.steps, start, positions * recipe.train.batch)
    seen = max(1, positions // 2 if config.causal else positions)
    cost = stack_cost(stack, seen)
    seconds, curve = 0.0, []
    for line in log:
        seconds += first.targets.numel() / line["tokens_per_second"]
        if line.get("held_out") is not None:
            spent = spent_flops(start, stages, line["step"], positions, recipe.train.batch)
            looked = {"loss": line["held_out"], **(line.get("measures") or {})}
            curve.append({"step": line["step"], "flops": spent, "seconds": seconds, **looked})
    return {
        "results": {name: dict(measures) for name, measures in outcome.splits.items()},
        "split": outcome.split,
        "measure": outcome.measure,
        "peers": dict(outcome.peers),
        "curve": curve,
        "gradient": [[line["step"], line["grad_norm"]] for line in log],
        "parameters": outcome.parameters,
        "executed_parameters": executed(stack),
        "flops_per_token": TRAINING * float(cost.flops),
        "cache_bytes_per_token": float(cost.cache_bytes) / seen,
        "flops": outcome.flops,
        "steps": outcome.steps,
        "targets": outcome.targets,
        "seconds": seconds,
        "program": config.program,
        "width": config.width,
        "hidden": config.inner,
        "recipe": recipe.plain(),
        **_made(),
    }


def executed(stack: Stack) -> int:
    """Parameters that a token passes, those of a layer once for each visit."""
    stored = sum(parameter.numel() for parameter in stack.parameters())
    of_layer = {
        (index, part): sum(parameter.numel() for parameter in layer.get_submodule(part).parameters())
        for index, layer in enumerate(stack.layers)
        for part in "af"
    }
    once = {(site.key.layer, site.part) for own in stack.sites for site in own}
    again = sum(of_layer[site.key.layer, site.part] for own in stack.sites for site in own)
    return stored + again - sum(of_layer[each] for each in once)


def _made() -> dict[str, Any]:
    return {"peak_bytes": largest_resident(), "source": source(), "versions": versions(), "machine": machine()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
