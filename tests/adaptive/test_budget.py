"""What a candidate costs, against the cost of the checkpoint and counts by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import deepen
from deepen.adaptive.search.budget import Budget, limit, meter, parse_budget
from deepen.adaptive.search.moves import Bank
from deepen.errors import UsageError
from deepen.program.normal import normalise
from tests.cli.models import checkpoint

BANK = Bank(6, "af")


@pytest.fixture(scope="module")
def ck(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return deepen.open(checkpoint(tmp_path_factory.mktemp("budget") / "llama"))


def items(text: str):
    return normalise(deepen.Program.parse(text).tree(), 6).items


def untimed(program: str) -> float:
    raise AssertionError(f"{program} is not to be timed")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0.75", Budget("layers", Fraction(3, 4))),
        ("75%", Budget("layers", Fraction(3, 4))),
        ("flops=3/4", Budget("flops", Fraction(3, 4))),
        ("cache = 0.5", Budget("cache", Fraction(1, 2))),
        ("layers=1.25", Budget("layers", Fraction(5, 4))),
    ],
)
def test_budgets_are_read(text: str, expected: Budget) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1/0", "flops=", "nan", "params=0%"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected a share"):
        parse_budget(text)


@pytest.mark.parametrize("program", ["0-5", "0-2 4-5", "0-2 (3)*2 5", "5 0", "0.f 1-4 5.a", "{0|1} 2-4"])
@pytest.mark.parametrize("kind", ["flops", "params", "cache"])
def test_equals_the_cost_of_the_checkpoint(ck: Any, kind: str, program: str) -> None:
    cost = ck.apply(program).cost(48)
    expected = {"flops": cost.flops, "params": cost.params, "cache": cost.cache_bytes}[kind]
    assert meter(ck, kind, 48, untimed)(items(program)) == pytest.approx(expected, rel=1e-12)


def test_layers_are_those_executed(ck: Any) -> None:
    measure = meter(ck, "layers", 48, untimed)
    assert measure(items("0-5")) == 6
    assert measure(items("0-1 (2)*3 {3|4}")) == 7
    one, other = measure(items("2.a")), measure(items("2.f"))
    assert one + other == pytest.approx(1)
    assert 0 < one != other


def test_latency_is_measured_once_a_program(ck: Any) -> None:
    timed = []
    measure = meter(ck, "latency", 48, lambda program: timed.append(program) or float(len(timed)))
    assert [measure(items(text)) for text in ("0-5", "0-4", "0-5")] == [1, 2, 1]
    assert timed == ["0-5", "0-4"]


def test_the_limit_is_a_share_of_the_whole(ck: Any) -> None:
    measure = meter(ck, "layers", 48, untimed)
    assert limit(parse_budget("0.75"), measure, items("0-5"), BANK, False) == 4.5


def test_a_budget_that_cannot_be_met_names_the_nearest(ck: Any) -> None:
    measure = meter(ck, "layers", 48, untimed)
    with pytest.raises(UsageError, match=r"cheapest program costs 0\.1667 .* nearest that can is layers=0\.1667$"):
        limit(parse_budget("0.16"), measure, items("0-5"), BANK, False)
    assert limit(parse_budget("layers=0.1667"), measure, items("0-5"), BANK, False) >= 1
    part = min(measure(items("0.a")), measure(items("0.f")))
    assert limit(parse_budget("0.16"), measure, items("0-5"), BANK, True) >= part
    ends = meter(ck, "params", 48, untimed)
    with pytest.raises(UsageError, match="nearest that can is params="):
        limit(parse_budget("params=0.1"), ends, items("0-5"), BANK, False)


def test_a_cost_that_a_model_lacks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no cache to save"):
        limit(parse_budget("cache=0.5"), lambda items: 0.0, items("0-5"), BANK, False)
