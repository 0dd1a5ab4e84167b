"""Every family against models made by hand; the verdicts are the rows of docs/families.md.

One family of each shape tries every operation here, every other one of the rest a shard of those that must be right;
the slow set tries every operation on every family.
After a change, `python -m deepen.checkpoint.families_page` writes the page anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepen.checkpoint.examine import CHECKS, Verdict, examine, page_refusals, page_rows
from deepen.checkpoint.family import known_families

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
MUST = ("identity", "drop", "reorder", "repeat", "copy", "group", "save", "cache")
SHARDS = (("drop", "cache"), ("reorder", "repeat"), ("identity", "save"))
SHAPES = (
    *("llama", "gemma2", "gpt2", "gpt_neox", "bloom", "opt", "qwen2_moe", "deepseek_v3", "mamba", "jamba"),
    *("bert", "albert", "modernbert", "t5", "bart", "whisper", "vit", "dinov2", "wav2vec2", "llava"),
)
# Those that take longest.
LONG = ("qwen2_moe", "deepseek_v3", "jamba", "bart", "whisper", "llava", "wav2vec2", "dinov2", "opt", "gpt_neox")


def judge(model_type: str, verdicts: list[Verdict]) -> None:
    assert not [verdict for verdict in verdicts if verdict.outcome == "wrong"]
    for verdict in verdicts:
        if verdict.operation in MUST:
            assert verdict.outcome == "right", verdict


def page_lines() -> list[str]:
    return PAGE.read_text(encoding="utf-8").splitlines()


def complete(model_type: str, folder: Path) -> None:
    verdicts = examine(model_type, folder)
    judge(model_type, verdicts)
    for row in (*page_rows(model_type, verdicts), *page_refusals(model_type, verdicts)):
        assert row in page_lines(), "docs/families.md is not up to date"


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=[pytest.mark.slow] if each in LONG else []) for each in SHAPES]
)
def test_shape_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    complete(model_type, tmp_path)


@pytest.mark.parametrize(("number", "model_type"), [
    pytest.param(number, model_type, marks=[pytest.mark.slow] if number % 3 else [])
    for number, model_type in enumerate(sorted(set(known_families()) - set(SHAPES)))
])  # fmt: skip
def test_family_is_right(number: int, model_type: str, tmp_path: Path) -> None:
    judge(model_type, examine(model_type, tmp_path, SHARDS[(number + number // 3) % len(SHARDS)]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(known_families()) - set(SHAPES)))
def test_family_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    complete(model_type, tmp_path)


def test_page_accounts_for_every_family_and_shows_nothing_wrong() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page_lines() if line.startswith("| ")]
    heading, *rest = rows
    assert heading == ["type", "tower", *CHECKS]
    towers = {(name, tower.name) for name, family in known_families().items() for tower in family.towers}
    shown = {(row[0], row[1]) for row in rest}
    assert shown <= towers
    assert len({name for name, _ in shown}) >= 73
    text = "".join(page_lines())
    assert all(f"`{name}`" in text for name in known_families().keys() - {name for name, _ in shown})
    assert not [row for row in rest if "wrong" in row]
    must = [heading.index(operation) for operation in MUST]
    for row in rest:
        assert all(row[column].startswith("right") or row[column] == "-" for column in must), row
