"""Recipes as files: what is read, what is filled in, and errors that name the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deepen.errors import UsageError
from deepen.train.recipe_file import RecipeFile
from tests.train.recipes import COPYING, recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_recipe_comes_back_from_its_own_text() -> None:
    made = recipe(grow=[{"at": 0.5}], depth={"turns": {"mean": 3}}, log={"rotation": True})
    assert RecipeFile.of(yaml.safe_load(made.yaml())) == made
    assert made.grow[0].factor == 2
    assert made.depth.turns is not None
    assert made.depth.turns.curriculum().mean == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack__wiring": {"name": "hyper-connections", "streams": 0}}, "stack.wiring.streams: got 0, must be >= 1"),
        ({"stack__widht": 3}, r"no key 'stack.widht' \(did you mean 'width'\?\)"),
        ({"stack__heads": 3}, "16 is not divisible by 3 heads"),
        ({"trian": {}}, r"no key 'trian' \(did you mean 'train'\?\)"),
        ({"train__rat": 1}, r"no key 'train.rat' \(did you mean 'rate'\?\)"),
        ({"train__rate": 0}, "train.rate: got 0, must be > 0"),
        ({"train__accumulate": 3}, "a batch of 4 cannot be read in 3 equal pieces"),
        ({"train__minutes": 1}, "expected one of steps, tokens, flops, minutes, got steps and minutes"),
        ({"train__steps": None}, "got none"),
        ({"train__optimiser": "sgd"}, "train.optimiser: got 'sgd', must be 'adamw' or 'muon'"),
        ({"task__lenght": [1, 2]}, r"no key 'task.lenght' \(did you mean 'length'\?\)"),
        ({"task__length": [2, 1]}, "task.length: a range is two numbers"),
        ({"task": {"name": "copy"}}, r"task.name: no task 'copy' \(did you mean 'copying'\?\)"),
        ({"task": "copying"}, "task: expected a table with a name, got 'copying'"),
        ({"grow": [{"at": 3, "factr": 2}]}, r"no key 'grow.0.factr' \(did you mean 'factor'\?\)"),
        ({"grow": [{"at": 1.5}]}, "grow.0.at: got 1.5, must be a number of steps >= 1, or a share"),
        ({"depth": {"turns": {"maen": 2}}}, "no key 'depth.turns.maen'"),
        ({"depth": {"dropping": 2}}, "depth.dropping: got 2, must be <= 1"),
    ],
)
def test_errors_name_the_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        recipe(**changes)
    assert str(caught.value).startswith("recipe: ")


def test_a_missing_part_is_named() -> None:
    with pytest.raises(UsageError, match="train: is missing"):
        RecipeFile.of({name: table for name, table in COPYING.items() if name != "train"})


def test_set_changes_one_field_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**COPYING, "grow": [{"at": 4}]}), encoding="utf-8")
    made = RecipeFile.read(path, ["train.rate=1e-2", "grow.0.factor=3", "log.rotation=true", "task.length=[2, 3]"])
    assert made.train.rate == 0.01
    assert made.grow[0].factor == 3
    assert made.log.rotation
    short = RecipeFile.read(path, ["train.minutes=2"]).train
    assert (short.minutes, short.steps) == (2, None)
    with pytest.raises(UsageError, match="got steps and minutes"):
        RecipeFile.read(path, ["train.minutes=2", "train.steps=3"])
    assert made.plain()["task"]["length"] == [2, 3]
    for change, message in (
        ("train.rate", "expected path=value"),
        ("grow.1.at=2", "grow has 1 entries"),
        ("train.steps.now=2", "train.steps is 12, not a table"),
        ("train.steps=[", "not YAML"),
        ("train.stps=3", "no key 'train.stps'"),
    ):
        with pytest.raises(UsageError, match=message):
            RecipeFile.read(path, [change])
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        RecipeFile.read(tmp_path / "none.yaml")
    path.write_text("recipe: a.yaml\nvariants: {}\n")
    with pytest.raises(UsageError, match=r"recipe\.yaml: a suite of variants, which deepen compare runs"):
        RecipeFile.read(path)
    path.write_text("- 1\n")
    with pytest.raises(UsageError, match="expected keys and values, got list"):
        RecipeFile.read(path)


def test_fields_that_follow_from_the_task_are_filled_in_and_others_refused() -> None:
    needs = recipe().task.data().stack
    assert recipe().stack_config(needs).vocabulary == needs["vocabulary"]
    assert recipe(stack__vocabulary=99).stack_config(needs).vocabulary == 99
    with pytest.raises(UsageError, match=r"stack\.vocabulary: got 3, the task needs 5 or more"):
        recipe(stack__vocabulary=3).stack_config(needs)
    with pytest.raises(UsageError, match=r"stack\.causal: got False, the task needs True"):
        recipe(stack__causal=False).stack_config(needs)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_along_are_right(path: Path) -> None:
    assert RecipeFile.read(path).train.batch > 0
