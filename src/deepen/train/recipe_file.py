"""A recipe: what to train on what, how long and how, as YAML.

    stack: {layers: 4, program: 0 (1-2)*2 3, width: 128, heads: 4}        deepen.stack.config
    task: {name: text, source: shakespeare}                               deepen.tasks
    train: {steps: 500, batch: 16, rate: 3e-3, optimiser: muon}
    grow: [{at: 0.5, factor: 2}]                                          optional, like what follows
    depth: {dropping: 0.5}
    log: {rotation: true}

Fields of the stack that follow from the task, such as the vocabulary, may be left out. `--set path=value` changes one
field, such as `train.steps=100` or `grow.0.factor=3`; the value is read as YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.tables import read_tables
from deepen.stack.told import told
from deepen.tasks.read import read_task, task_class
from deepen.tasks.task import Task
from deepen.train.curriculum import Curriculum
from deepen.train.distributed import Parallel
from deepen.train.schedule import Schedule

# How long: exactly one of them is given.
LENGTHS = ("steps", "tokens", "flops", "minutes")


class Part(BaseModel):
    """A table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Training(Part):
    """How long and how.

    Attributes:
        steps: updates.
        tokens: to train on, in place of steps; examples where each has one target.
        flops: to spend on forward and backward passes, in place of steps.
        minutes: to spend, in place of steps: a few steps are timed first, on a copy, and say how many fit.
        batch: rows of an update.
        accumulate: equal pieces that a batch is read in, to save memory.
        rate: the highest learning rate.
        optimiser: `adamw`, or `muon` for the matrices of the layers and AdamW for the rest.
        schedule: `cosine`, `wsd` or `constant`.
        warmup: steps over which the rate rises; below 1 a share of the steps.
        decay: the share of the steps over which `wsd` falls at the end.
        floor: the share of the rate that a schedule ends at.
        weight_decay: of matrices; norms and biases have none.
        beta1: of AdamW.
        beta2: of AdamW.
        eps: of AdamW.
        clip: the largest norm of the gradient.
        noise: eta of the noise on gradients; 0 adds none.
        dtype: `bfloat16` computes products of matrices in it; weights stay in float32.
        compile: run the stack through `torch.compile`.
        checkpointing: compute each visit again in the backward pass, to save memory.
        seed: of the initial weights, the order of the data and every draw.
        evaluate: steps between looks at the first held-out part; 0 never looks.
        save: steps between states on disk; 0 saves only at the end.
        async_save: write states while training goes on.
        parallel: what each of several processes holds, under torchrun: `ddp` the whole stack, `fsdp` a share of it.
    """

    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    flops: float | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=None, gt=0)
    batch: int = Field(default=16, ge=1)
    accumulate: int = Field(default=1, ge=1)
    rate: float = Field(default=3e-3, gt=0)
    optimiser: Literal["adamw", "muon"] = "adamw"
    schedule: Schedule = "cosine"
    warmup: float = Field(default=0.05, ge=0)
    decay: float = Field(default=0.2, ge=0, le=1)
    floor: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip: float = Field(default=1.0, gt=0)
    noise: float = Field(default=0.0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    checkpointing: bool = False
    seed: int = Field(default=0, ge=0)
    evaluate: int = Field(default=100, ge=0)
    save: int = Field(default=100, ge=0)
    async_save: bool = False
    parallel: Parallel = "ddp"

    @model_validator(mode="after")
    def _fits(self) -> Training:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of {', '.join(LENGTHS)}, got {' and '.join(given) or 'none'}")
        if self.batch % self.accumulate:
            raise ValueError(f"a batch of {self.batch} cannot be read in {self.accumulate} equal pieces")
        return self


class Growing(Part):
    """One growth in depth; see `deepen.train.growth`.

    Attributes:
        at: steps before it, a share of the steps, or `guideline` for the published rule.
        factor: how many times the layers.
        order: `whole` or `interleaved`.
        optimiser: `carry`: copies have the state of their layers; `fresh`: all of it starts anew.
        warmup: steps over which the rate rises again after it.
    """

    at: int | float | Literal["guideline"]
    factor: int = Field(default=2, ge=2)
    order: Literal["whole", "interleaved"] = "whole"
    optimiser: Literal["carry", "fresh"] = "carry"
    warmup: int = Field(default=0, ge=0)

    @field_validator("at")
    @classmethod
    def _ahead(cls, at: float | str) -> float | str:
        if isinstance(at, int | float) and (at <= 0 or (at > 1 and at != int(at))):
            raise ValueError(f"got {at}, must be a number of steps >= 1, or a share between 0 and 1")
        return at


class Turning(Part):
    """How the counts of run-time loops are drawn; see `deepen.train.curriculum`."""

    mean: int = Field(ge=1)
    share: float = Field(default=0.25, ge=0, le=1)
    shape: Literal["linear", "1-sqrt"] = "linear"
    spread: float = Field(default=0.5, ge=0, le=2)

    def curriculum(self) -> Curriculum:
        return Curriculum(mean=self.mean, share=self.share, shape=self.shape, spread=self.spread)


class Deepening(Part):
    """Schedules of depth; see `deepen.train.depth`.

    Attributes:
        dropping: the share of the steps over which the chance to drop a visit rises to that of the wiring.
        turns: how often run-time loops run.
    """

    dropping: float | None = Field(default=None, gt=0, le=1)
    turns: Turning | None = None


class Logging(Part):
    """What is logged beside losses and measures.

    Attributes:
        rotation: how far the layers have turned from their initial values; see `deepen.train.rotation`.
        tensorboard: a folder that gets a folder of event files for each run; see `deepen.train.trackers`.
        trackio: the Trackio project that gets each run.
    """

    rotation: bool = False
    tensorboard: str | None = Field(default=None, min_length=1)
    trackio: str | None = Field(default=None, min_length=1)


class RecipeFile(Part):
    """A recipe, checked.

    Attributes:
        stack: what is trained; fields that follow from the task may be missing, which `stack_config` fills in.
        task: what it is trained on.
        train: how long and how.
        grow: when it grows.
        depth: schedules of depth.
        log: what else is logged.

    Example:
        >>> RecipeFile.of(
        ...     {"stack": {"layers": 2, "width": 16, "heads": 2}, "task": {"name": "parity"}, "train": {"steps": 5}}
        ... ).train.batch
        16
    """

    stack: dict[str, Any]
    task: SerializeAsAny[Task]
    train: Training
    grow: tuple[Growing, ...] = ()
    depth: Deepening = Deepening()
    log: Logging = Logging()

    @field_validator("task", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return read_task(value) if isinstance(value, dict) else value

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str = "recipe") -> RecipeFile:
        """A recipe from plain values.

        Raises:
            UsageError: names the path of what is wrong and, of an unknown key, the nearest.
        """
        try:
            # the parts one by one, so that the path of an error begins with theirs
            found = cls.model_validate({**data, "task": _task(data.get("task"))} if "task" in data else dict(data))
            _stack(found.stack)
        except ValidationError as error:
            raise UsageError(f"{where}: {told(error, _keys)}") from None
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        return found

    @classmethod
    def read(cls, path: str | Path, changes: Sequence[str] = ()) -> RecipeFile:
        """A recipe from a YAML file.

        Args:
            path: of the file.
            changes: such as `train.steps=100`; a length takes the place of the one in the file.

        Raises:
            UsageError: the file cannot be read, or something in it is wrong.
        """
        data = read_tables(path)
        if "variants" in data and "stack" not in data:
            raise UsageError(f"{path}: a suite of variants, which deepen compare runs; expected a recipe")
        for change in changes:
            _set(data, change)
        lengths = {change.partition("=")[0].removeprefix("train.") for change in changes} & set(LENGTHS)
        if lengths and isinstance(train := data.get("train"), dict):
            data["train"] = {name: value for name, value in train.items() if name not in LENGTHS or name in lengths}
        return cls.of(data, str(path))

    def stack_config(self, needs: Mapping[str, Any]) -> StackConfig:
        """The configuration of the stack.

        Args:
            needs: fields that follow from the data.

        Raises:
            UsageError: the recipe says otherwise, or something does not fit.
        """
        for name, wanted in needs.items():
            given = self.stack.get(name, wanted)
            if given != wanted and not (name in ("vocabulary", "context") and given > wanted):
                at_least = " or more" if name in ("vocabulary", "context") else ""
                raise UsageError(f"stack.{name}: got {given!r}, the task needs {wanted!r}{at_least}")
        return _stack({**needs, **self.stack})

    def plain(self) -> dict[str, Any]:
        """The recipe as plain values, which `of` reads."""
        return {
            "stack": dict(self.stack),
            "task": self.task.model_dump(mode="json"),
            "train": self.train.model_dump(mode="json", exclude_none=True),
            "grow": [each.model_dump(mode="json") for each in self.grow],
            "depth": self.depth.model_dump(mode="json", exclude_none=True),
            "log": self.log.model_dump(mode="json", exclude_none=True),
        }

    def yaml(self) -> str:
        """The recipe as the text of a file."""
        return yaml.safe_dump(self.plain(), sort_keys=False)


def _task(value: Any) -> Any:
    """A task of a table, with errors that begin with its path."""
    if not isinstance(value, dict):
        raise UsageError(f"task: expected a table with a name, got {value!r}")
    try:
        return read_task(value)
    except ValidationError as error:
        kind = task_class(value.get("name"))
        raise UsageError(told(error, lambda _: kind.model_fields, "task")) from None
    except UsageError as error:
        raise UsageError(f"task.name: {error}") from None


def _stack(fields: Mapping[str, Any]) -> StackConfig:
    """A configuration, with errors that begin with its path; what a task gives stands in for what is missing."""
    stand = dict[str, Any]()
    if fields.get("input", "tokens") != "tokens":
        stand["output"] = "classes"
    if fields.get("input") == "patches" and isinstance(side := fields.get("patch", 1), int):
        stand["image"] = [1, side, side]
    if {**stand, **fields}.get("output") == "classes":
        stand["classes"] = 1
    try:
        return StackConfig.model_validate({**stand, **fields})
    except ValidationError as error:
        raise UsageError(told(error, lambda _: StackConfig.model_fields, "stack")) from None


def _keys(path: tuple[str, ...]) -> Iterable[str]:
    """The keys that a table of a recipe has."""
    tables: dict[str, type[BaseModel]] = {"train": Training, "grow": Growing, "depth": Deepening, "log": Logging}
    if not path:
        return RecipeFile.model_fields
    return Turning.model_fields if path[-1] == "turns" else tables[path[0]].model_fields


def _set(data: dict[str, Any], change: str) -> None:
    """Changes one field of a recipe.

    Raises:
        UsageError: not a path and a value, or a path through something that is no table.
    """
    path, sign, text = change.partition("=")
    names = path.split(".")
    if not sign or not all(names):
        raise UsageError(f"--set {change}: expected path=value, such as train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {change}: not YAML: {' '.join(str(error).split())}") from error
    table: Any = data
    for place, name in enumerate(names):
        key: Any = name
        if isinstance(table, list):
            if not name.isdecimal() or int(name) >= len(table):
                raise UsageError(f"--set {change}: {'.'.join(names[:place])} has {len(table)} entries, counted from 0")
            key = int(name)
        elif not isinstance(table, dict):
            raise UsageError(f"--set {change}: {'.'.join(names[:place])} is {table!r}, not a table")
        if place == len(names) - 1:
            table[key] = value
        else:
            if isinstance(table, dict) and table.get(key) is None:
                table[key] = {}
            table = table[key]
