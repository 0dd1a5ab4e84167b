"""Suites: what variants become under a budget, and errors that name the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deepen.compare.suite import Suite, laid, variants
from deepen.errors import UsageError

RECIPE: dict[str, Any] = {
    "stack": {"layers": 4, "width": 16, "heads": 2},
    "task": {"name": "parity"},
    "train": {"steps": 40, "batch": 4},
}
SUITE: dict[str, Any] = {
    "recipe": RECIPE,
    "baseline": "untied",
    "variants": {"untied": {}, "looped": {"stack": {"layers": 2, "program": "(0-1)*2"}}},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({**SUITE, **changes}), encoding="utf-8")
    return path


def made(folder: Path, **changes: Any) -> dict[str, Any]:
    path = written(folder, **changes)
    return {each.name: each for each in variants(Suite.read(path), str(path))}


def test_changes_are_laid_over_tables_and_names_replace_them() -> None:
    under = {"stack": {"layers": 4, "wiring": {"name": "hyper-connections", "streams": 2}}, "train": {"steps": 3}}
    over = {"stack": {"wiring": {"name": "deepnorm"}}, "train": {"rate": 0.1}}
    assert laid(under, over) == {
        "stack": {"layers": 4, "wiring": {"name": "deepnorm"}},
        "train": {"steps": 3, "rate": 0.1},
    }
    assert under["train"] == {"steps": 3}


def test_the_baseline_comes_first_and_is_left_as_it_is(tmp_path: Path) -> None:
    found = made(tmp_path, variants={"looped": SUITE["variants"]["looped"], "untied": {}})
    assert list(found) == ["untied", "looped"]
    assert found["untied"].config.width == found["looped"].config.width == 16
    assert found["looped"].config.program == "(0-1)*2"
    assert found["looped"].measure == "exact_match"


def test_parameters_are_matched_by_width(tmp_path: Path) -> None:
    found = made(tmp_path, budget={"equal": "parameters", "tolerance": 0.02})
    base, looped = (found[name].size.parameters for name in ("untied", "looped"))
    assert looped == pytest.approx(base, rel=0.02)
    assert found["looped"].recipe.stack["width"] == found["looped"].config.width > 16


def test_flops_are_matched_by_steps(tmp_path: Path) -> None:
    deep = {"untied": {}, "deep": {"stack": {"layers": 8}}}
    found = made(tmp_path, budget={"equal": "flops", "vary": "steps"}, variants=deep)
    spent = {name: each.recipe.train.steps * each.size.flops for name, each in found.items()}
    assert spent["deep"] == pytest.approx(spent["untied"], rel=0.02)
    assert found["deep"].recipe.train.steps < 40


def test_minutes_take_the_place_of_other_lengths(tmp_path: Path) -> None:
    found = made(tmp_path, budget={"equal": "minutes", "minutes": 0.5})
    assert [(each.recipe.train.minutes, each.recipe.train.steps) for each in found.values()] == [(0.5, None)] * 2


def test_seeds_are_those_of_training(tmp_path: Path) -> None:
    assert made(tmp_path)["untied"].seeded(7).train.seed == 7


def test_a_recipe_of_its_own_file_is_found_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    assert set(made(tmp_path, recipe="base.yaml")) == {"untied", "looped"}


def test_a_recipe_in_the_place_of_a_suite_is_told_from_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    with pytest.raises(UsageError, match=r"recipe\.yaml: a recipe, which deepen train runs; expected a suite"):
        Suite.read(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": "untyed"}, r"suite.yaml: baseline: no variant 'untyed' \(did you mean 'untied'\?\)"),
        ({"bugdet": {}}, r"suite.yaml: no key 'bugdet' \(did you mean 'budget'\?\)"),
        ({"budget": {"eqal": "flops"}}, r"no key 'budget.eqal' \(did you mean 'equal'\?\)"),
        ({"budget": {"equal": "minutes"}}, "budget: minutes are given where they are what is equal"),
        ({"budget": {"equal": "parameters", "vary": "steps"}}, "budget: steps do not change parameters"),
        ({"seeds": []}, "seeds: "),
        ({"seeds": [1, 1]}, "one is there twice"),
        ({"recipe": "none.yaml"}, "none.yaml: No such file"),
        ({"variants": {"untied": {}, "../up": {}}}, "'../up' cannot name a folder"),
        (
            {"variants": {"untied": {}, "x": {"stack": {"wiring": {"name": "hyper-connections", "streams": 0}}}}},
            r"variants.x: stack.wiring.streams: got 0, must be >= 1",
        ),
        (
            {"budget": {"equal": "parameters", "tolerance": 1e-9}},
            r"variants.looped: no width gives [\d,]+ parameters: the nearest is [\d,]+ at width",
        ),
    ],
)
def test_errors_name_the_place(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        made(tmp_path, **changes)
