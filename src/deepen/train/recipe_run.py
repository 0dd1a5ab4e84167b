"""Runs a recipe: data, stack, steps, callbacks, the loop, what is held out, and a folder at the end.

OUTPUT.training/log.jsonl          one line a step; the truth about the run
/step-00000100/     the last state
/recipe.yaml        the recipe, with the number of its steps
OUTPUT/                            the stack, as `deepen run` opens it; recipe.yaml, log.jsonl, result.json
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from deepen.checkpoint.atomic import atomic_file, atomic_folder
from deepen.errors import SaveError, UsageError
from deepen.stack.stack import Stack
from deepen.tasks.batch import Batch
from deepen.tasks.task import Data
from deepen.train.callbacks import Callback
from deepen.train.depth import Depth
from deepen.train.distributed import ALONE, Processes, gathered
from deepen.train.growth import Grow, Stage
from deepen.train.learner import Learner, TaskLoss, evaluated
from deepen.train.length import copied, spent_flops, stages_of, step_tokens, steps_of
from deepen.train.log import Entry
from deepen.train.loop import train
from deepen.train.muon import optimiser_of
from deepen.train.noise import GradientNoise
from deepen.train.recipe_file import RecipeFile
from deepen.train.rotation import Rotation
from deepen.train.schedule import Scheduled
from deepen.train.state import require_start
from deepen.train.trackers import trackers_of

RECIPE, RESULT, LOG = "recipe.yaml", "result.json", "log.jsonl"
# What a resumed run may change: it moves no weight.
FREE = ("train.evaluate", "train.save", "train.async_save", "train.parallel", "log.tensorboard", "log.trackio")
# What asks for whole parameters, which processes that hold shares of them do not have.
WHOLE = ("train.optimiser", "train.noise", "train.compile", "grow", "log.rotation")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to.

    Attributes:
        recipe: that was run, with the number of its steps.
        steps: updates.
        targets: tokens, or examples, that were trained on.
        seconds: of this process, in the loop, looks at held-out data included.
        parameters: stored numbers of the stack at the end.
        flops: of all forward and backward passes.
        measure: the name of the measure that counts.
        splits: the measures of each held-out part.
        peers: what a simple model that was fitted beside reaches on the last part.
        curve: step and measures, whenever the first held-out part was looked at by this process.
        stack: the trained stack, in eval mode.
        data: what it was trained on.
    """

    recipe: RecipeFile
    steps: int
    targets: int
    seconds: float
    parameters: int
    flops: float
    measure: str
    splits: Mapping[str, Mapping[str, float]]
    peers: Mapping[str, float]
    curve: tuple[Mapping[str, float], ...]
    stack: Stack = field(repr=False)
    data: Data = field(repr=False)

    @property
    def split(self) -> str:
        """The held-out part that the run is judged by."""
        return _judged(self.data)

    @property
    def score(self) -> float:
        """The measure that counts, on the held-out part that the run is judged by."""
        return self.splits[self.split][self.measure]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        names = ("steps", "targets", "seconds", "parameters", "flops", "measure", "splits", "peers", "curve")
        return {name: getattr(self, name) for name in names} | {"recipe": self.recipe.plain()}


def run_recipe(
    recipe: RecipeFile,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    device: str = "cpu",
    report: Callable[[Entry, int], None] | None = None,
    data: Data | None = None,
    models: bool = True,
    processes: Processes = ALONE,
    name: str | None = None,
) -> Outcome:
    """Trains what a recipe says.

    Args:
        recipe: what to do.
        output: a folder that does not exist yet; None writes nothing.
        resume: go on with the run of the same output.
        device: where the weights go.
        report: called after every step, with the number of all steps.
        data: that of the recipe's task, where it was read before.
        models: write the stack into the output; else recipe, log and result alone.
        processes: who train it together, from `joined`; each calls this, and the first one alone writes and reports.
        name: of the run, for trackers; that of the output by default.

    Raises:
        UsageError: fields of the recipe that do not fit the data or each other, another run to resume, or a tracker
            that is not installed.
        DataError: data that is missing or too small; says how to get it.
        ProgramError: a program that a stack or its wiring does not execute.
        NotFinite: a loss or gradient that is NaN or infinite, with the step and the place.
        Stopped: SIGTERM came; the state is saved.
        SaveError: something cannot be written; the last state is whole.
    """
    output = None if output is None else Path(output)
    work = None if output is None else output.with_name(f"{output.name}.training")
    if output is not None and work is not None:
        _require_place(output)
        require_start(work, resume)
    _require_shares(recipe, processes)
    trackers = trackers_of(recipe, name or ("run" if output is None else output.name))
    data = recipe.task.data() if data is None else data
    place, settings = processes.place(device), recipe.train
    stack = Stack(recipe.stack_config(data.stack), seed=settings.seed).to(place)
    stack.checkpointing = settings.checkpointing
    first = data.batch(0, settings.batch, settings.seed)
    steps = _resolved(work, resume)
    if steps is None or settings.steps is not None:
        steps = processes.by_first(lambda: _steps(recipe, stack, data, first, place, processes))
    positions = step_tokens(stack, 1, first.inputs.shape[-1])
    stages = stages_of(recipe, steps, stack, positions * settings.batch)
    scheduled = _scheduled(recipe, steps, stages)
    recipe = recipe.model_copy(update={"train": settings.model_copy(
        update={"steps": steps, "tokens": None, "flops": None, "minutes": None})})  # fmt: skip
    flops = spent_flops(stack, stages, steps, positions, settings.batch)
    learner, autocast = Learner(stack, compiled=settings.compile), settings.dtype == "bfloat16"
    if work is not None:
        processes.by_first(lambda: _write(work, recipe))
    curve = list[Mapping[str, float]]()

    def reported(entry: Entry) -> None:
        if entry.held_out is not None:
            curve.append({"step": entry.step, "loss": entry.held_out, **(entry.measures or {})})
        trackers.write(entry)
        if report is not None:
            report(entry, steps)

    def look() -> Mapping[str, float]:
        split = data.splits[0]
        return evaluated(learner, data, [split], settings.batch, device=place, autocast=autocast)[split]

    started = time.perf_counter()
    try:
        train(
            learner,
            lambda step: data.batch(step, settings.batch, settings.seed),
            scheduled,
            loss=TaskLoss(),
            folder=work,
            resume=resume,
            settings={**_fixed(recipe), "data": data.digest},
            evaluate=look,
            report=reported,
            optimise=optimiser_of,
            callbacks=_callbacks(recipe, learner, stages, steps),
            processes=processes,
            background=settings.async_save,
        )
    finally:
        trackers.close()
    seconds = time.perf_counter() - started
    if processes.sharded:
        learner = Learner(gathered(learner.stack)).eval()
    outcome = Outcome(
        recipe=recipe,
        steps=steps,
        targets=steps * first.asked,
        seconds=seconds,
        parameters=sum(parameter.numel() for parameter in learner.stack.parameters()),
        flops=flops,
        measure=data.measure,
        splits=evaluated(learner, data, data.splits, settings.batch, device=place, autocast=autocast),
        peers=data.peers(),
        curve=tuple(curve),
        stack=learner.stack.eval(),
        data=data,
    )
    if output is not None and work is not None:
        processes.by_first(lambda: _finish(outcome, output, work, models))
    return outcome


def _steps(
    recipe: RecipeFile, stack: Stack, data: Data, first: Batch, device: torch.device, processes: Processes
) -> int:
    """The steps that a recipe means; times some where it says minutes."""
    if recipe.train.minutes is None:
        trial, optimiser = Learner(stack), None
    else:
        trial = Learner(copied(stack), compiled=recipe.train.compile)
        optimiser = optimiser_of(trial, _scheduled(recipe, 1, ()))
    autocast = recipe.train.dtype == "bfloat16"

    def step() -> None:
        assert optimiser is not None
        optimiser.zero_grad(set_to_none=True)
        for piece in processes.share(first.to(device), recipe.train.accumulate):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                loss = TaskLoss()(trial, piece)
            loss.backward()
        optimiser.step()

    def look() -> None:
        trial.eval()
        evaluated(trial, data, data.splits[:1], recipe.train.batch, device=device, autocast=autocast)
        trial.train()

    drawn = torch.random.get_rng_state()
    try:
        return steps_of(recipe, stack, row_length=first.inputs.shape[-1], targets=first.asked, step=step, look=look)
    finally:
        torch.random.set_rng_state(drawn)


def _scheduled(recipe: RecipeFile, steps: int, stages: tuple[Stage, ...]) -> Scheduled:
    """The run as the loop takes it."""
    train = recipe.train
    return Scheduled(
        steps=steps,
        batch=train.batch,
        accumulate=train.accumulate,
        lr=train.rate,
        warmup=round(train.warmup * steps) if train.warmup < 1 else int(train.warmup),
        floor=train.floor,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.eps,
        clip=train.clip,
        autocast=train.dtype == "bfloat16",
        seed=train.seed,
        eval_every=train.evaluate,
        save_every=train.save,
        schedule=train.schedule,
        decay=train.decay,
        optimiser=train.optimiser,
        grown=tuple(stage.step for stage in stages),
        rewarm=max((growing.warmup for growing in recipe.grow), default=0),
    )


def _callbacks(recipe: RecipeFile, learner: Learner, stages: tuple[Stage, ...], steps: int) -> list[Callback]:
    """What happens beside updates; growth first, since the others look at the stack."""
    rotation = Rotation(learner) if recipe.log.rotation else None
    turns = recipe.depth.turns
    made: list[Callback] = [Grow(learner, stages, rotation)] if stages else []
    made.append(
        Depth(
            learner,
            steps=steps,
            seed=recipe.train.seed,
            dropping=recipe.depth.dropping,
            turns=None if turns is None else turns.curriculum(),
        )
    )
    made += [] if rotation is None else [rotation]
    return made + ([GradientNoise(recipe.train.noise, recipe.train.seed)] if recipe.train.noise else [])


def _judged(data: Data) -> str:
    """The held-out part that a run is judged by: `held_out` or `test`, else the first."""
    return next((split for split in data.splits if split in ("held_out", "test")), data.splits[0])


def _fixed(recipe: RecipeFile) -> dict[str, Any]:
    """The fields that a resumed run must share, by their paths."""

    def fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if inner is None:
            yield path, value
        else:
            for name, each in inner:
                yield from fields(each, f"{path}.{name}" if path else str(name))

    return {path: value for path, value in fields(recipe.plain(), "") if path not in FREE}


def _resolved(work: Path | None, resume: bool) -> int | None:
    """The steps that the run to be resumed found to fit; None where there is none."""
    if work is None or not resume or not (work / RECIPE).is_file():
        return None
    return RecipeFile.read(work / RECIPE).train.steps


def _require_shares(recipe: RecipeFile, processes: Processes) -> None:
    """Refuses a recipe that several processes cannot train as it stands.

    Raises:
        UsageError: the batch does not divide, or something needs whole parameters where each has a share.
    """
    train = recipe.train
    if train.batch % (train.accumulate * processes.count):
        raise UsageError(
            f"train.batch: {train.batch} rows cannot be shared equally by {processes.count} processes in "
            f"{train.accumulate} pieces each; choose a multiple of {train.accumulate * processes.count}"
        )
    asked = (train.optimiser == "muon", train.noise > 0, train.compile, bool(recipe.grow), recipe.log.rotation)
    found = [name for name, set_ in zip(WHOLE, asked, strict=True) if set_]
    if processes.sharded and found:
        raise UsageError(
            f"train.parallel: fsdp gives each process a share of the parameters, and {found[0]} needs whole ones; "
            "choose ddp, or leave it out"
        )


def _require_place(output: Path) -> None:
    """Refuses, before anything is read, a place that the result could not be written to."""
    if os.path.lexists(output):
        raise SaveError(f"{output} exists already and is left as it is; choose a new name or remove it first")
    parent = output.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SaveError(f"cannot write {output}: {parent} is not a folder that can be written; make it first")


def _write(work: Path, recipe: RecipeFile) -> None:
    try:
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"cannot make {work}: {error.strerror}; choose another place") from error
    with atomic_file(work / RECIPE) as file:
        file.write(recipe.yaml())


def _finish(outcome: Outcome, output: Path, work: Path, models: bool) -> None:
    """Writes the stack, if wanted, and what is known of the run, and removes the states.

    Raises:
        SaveError: it cannot be written; the state of the run is whole.
    """
    try:
        with atomic_folder(output) as partial:
            if models:
                # takes seconds to import
                from deepen.checkpoint.stack_folder import write_stack

                write_stack(outcome.stack, partial, outcome.data.tokenizer)
            shutil.copyfile(work / LOG, partial / LOG)
            (partial / RECIPE).write_text(outcome.recipe.yaml(), encoding="utf-8")
            (partial / RESULT).write_text(json.dumps(outcome.to_json(), indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"cannot write {output}: {error}; the trained state is whole in {work}: make room and go on with --resume"
        ) from error
    shutil.rmtree(work, ignore_errors=True)
