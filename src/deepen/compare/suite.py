"""A suite: variants of one recipe, each trained under the same seeds and one budget.

    recipe: ../shakespeare.yaml                     a file, or the tables themselves
    change: {train: {steps: 300}}                   of every variant
    seeds: [0, 1, 2]
    budget: {equal: parameters, vary: width}
    baseline: untied
    variants:
      untied: {stack: {layers: 8}}
      looped: {stack: {layers: 4, program: 0 (1-2)*3 3}}

A change is laid over the recipe table by table; a table that has a name, such as a wiring, replaces the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepen.compare.budget import Size, matched, size
from deepen.errors import DeepenError, UsageError, nearest
from deepen.stack.config import StackConfig
from deepen.stack.tables import read_tables
from deepen.stack.told import told
from deepen.tasks.task import Data
from deepen.train.recipe_file import RecipeFile

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Part(BaseModel):
    """A table of a suite."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(Part):
    """What every variant has the same of.

    Attributes:
        equal: `parameters` that are stored; `flops` that training executes; `minutes` of training; `steps` alone.
        vary: what is solved for: the `width`, the `hidden` width of the feed-forwards, or, of FLOPs, the `steps`.
        tolerance: how far from the baseline a variant may be, as a share.
        minutes: of each run, where they are what is equal.
    """

    equal: Literal["parameters", "flops", "minutes", "steps"] = "steps"
    vary: Literal["width", "hidden", "steps"] = "width"
    tolerance: float = Field(default=0.01, gt=0, lt=1)
    minutes: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Budget:
        if (self.minutes is not None) != (self.equal == "minutes"):
            raise ValueError("minutes are given where they are what is equal, and only there")
        if self.vary == "steps" and self.equal != "flops":
            raise ValueError(f"steps do not change {self.equal}; vary the width or the hidden width")
        return self


class Suite(Part):
    """What is compared.

    Attributes:
        recipe: of `deepen train`: a file, beside the suite or below it, or its tables.
        change: laid over the recipe of every variant.
        seeds: of each variant; the same ones are compared in pairs.
        budget: what is the same for all.
        baseline: the variant that the others are matched to and compared with.
        measure: what is compared, by its name in the results; None: what the task measures.
        variants: the changes of each, by name.
    """

    recipe: str | dict[str, Any]
    change: dict[str, Any] = {}
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    budget: Budget = Budget()
    baseline: str
    measure: str | None = None
    variants: dict[str, dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Suite:
        if self.baseline not in self.variants:
            raise ValueError(
                f"baseline: no variant {self.baseline!r}{nearest(self.baseline, self.variants)}; "
                f"there are {', '.join(self.variants)}"
            )
        if wrong := next((name for name in self.variants if not NAME.fullmatch(name)), None):
            raise ValueError(f"variants: {wrong!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds: one is there twice")
        return self

    @classmethod
    def read(cls, path: str | Path) -> Suite:
        """A suite from a YAML file; the recipe that it names is read too.

        Raises:
            UsageError: names the file, the path of what is wrong and, of an unknown key, the nearest.
        """
        data = read_tables(path)
        if "stack" in data and "recipe" not in data:
            raise UsageError(
                f"{path}: a recipe, which deepen train runs; expected a suite: recipe, variants and baseline"
            )
        try:
            suite = cls.model_validate(data)
        except ValidationError as error:
            raise UsageError(f"{path}: {told(error, _keys)}") from None
        if isinstance(suite.recipe, str):
            suite = suite.model_copy(update={"recipe": read_tables(Path(path).parent / suite.recipe)})
        return suite


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant, with what the budget made of it.

    Attributes:
        name: of the suite.
        recipe: for the first seed.
        config: its stack.
        size: what it takes.
        measure: what its task measures.
    """

    name: str
    recipe: RecipeFile
    config: StackConfig
    size: Size
    measure: str

    def seeded(self, seed: int) -> RecipeFile:
        """The recipe of one run."""
        return self.recipe.model_copy(update={"train": self.recipe.train.model_copy(update={"seed": seed})})


def variants(suite: Suite, where: str) -> list[Variant]:
    """The variants of a suite, the baseline first, each brought to the budget.

    Args:
        suite: read from a file.
        where: its name in errors.

    Raises:
        UsageError: a recipe is wrong or cannot meet the budget; names the variant.
        DataError: the data of a task is not there.
    """
    known: dict[str, Data] = {}
    made: list[Variant] = []
    for name in (suite.baseline, *(each for each in suite.variants if each != suite.baseline)):
        place = f"{where}: variants.{name}"
        tables = laid(laid(suite.recipe if isinstance(suite.recipe, dict) else {}, suite.change), suite.variants[name])
        if suite.budget.equal == "minutes":
            train = {
                key: value for key, value in tables.get("train", {}).items() if key not in ("steps", "tokens", "flops")
            }
            tables["train"] = {**train, "minutes": suite.budget.minutes}
        try:
            recipe = RecipeFile.of(tables, place)
            task = recipe.task.model_dump_json()
            data = known[task] = known.get(task) or recipe.task.data()
            made.append(_variant(name, recipe, data, suite.budget, made[0] if made else None))
        except DeepenError as error:
            raise error if str(error).startswith(place) else type(error)(f"{place}: {error}") from None
    return made


def laid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others laid over them; one that has a name replaces what was there."""
    found = dict(under)
    for key, value in over.items():
        old = found.get(key)
        merges = isinstance(old, dict) and isinstance(value, dict) and "name" not in value
        found[key] = laid(old, value) if merges else value  # pyright: ignore[reportArgumentType]
    return found


def _variant(name: str, recipe: RecipeFile, data: Data, budget: Budget, base: Variant | None) -> Variant:
    config = recipe.stack_config(data.stack)
    if base is not None and budget.equal in ("parameters", "flops") and budget.vary != "steps":
        unit = "parameters" if budget.equal == "parameters" else "flops"
        config = matched(
            config, base.size.of(unit), unit=unit, context=config.context, vary=budget.vary, tolerance=budget.tolerance
        )
        recipe = recipe.model_copy(update={"stack": {**recipe.stack, "width": config.width, "hidden": config.hidden}})
    found = size(config, config.context)
    if base is not None and budget.equal == "flops" and budget.vary == "steps":
        steps = base.recipe.train.steps
        if steps is None:
            raise UsageError("a budget of FLOPs that varies the steps needs train.steps of the baseline")
        steps = max(1, round(steps * base.size.flops / found.flops))
        lengths = {"steps": steps, "tokens": None, "flops": None, "minutes": None}
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=lengths)})
    return Variant(name=name, recipe=recipe, config=config, size=found, measure=data.measure)


def _keys(path: tuple[str, ...]) -> Mapping[str, Any]:
    return Budget.model_fields if path[:1] == ("budget",) else Suite.model_fields
