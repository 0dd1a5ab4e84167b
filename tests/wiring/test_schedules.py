"""Factors on updates, of the training step, of a gate or learned: ProRes, SkipInit and highway."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from deepen.errors import UsageError
from deepen.wiring.prores import Schedule, factor
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case

TOKENS = laws.tokens()


def logits(stack: Any) -> torch.Tensor:
    with torch.no_grad():
        return stack(TOKENS).logits


def factors(schedule: Any, step: int, blocks: int = 4, base: int = 10) -> list[float]:
    return [round(float(factor(schedule, torch.tensor(step), b + 1, blocks, base)), 3) for b in range(blocks)]


@pytest.mark.method("prores")
def test_the_linear_table_of_prores() -> None:
    assert factors("linear", 0) == [0, 0, 0, 0]
    assert factors("linear", 10) == [1, 0.5, 0.333, 0.25]
    assert factors("linear", 25) == [1, 1, 0.833, 0.625]
    assert factors("linear", 40) == [1, 1, 1, 1]


@pytest.mark.method("prores")
@pytest.mark.parametrize(
    ("schedule", "at_15"),
    [
        ("linear-sqrt", [1, 0.866, 0.707, 0.612]),
        ("linear-square", [1, 0.562, 0.25, 0.141]),
        ("equal", [1, 1, 1, 1]),
        ("reverse", [0.375, 0.5, 0.75, 1]),
        ("stagewise-0", [1, 0.5, 0, 0]),
        ("stagewise-L", [1, 0.625, 0.25, 0.25]),
        ("stagewise-sqrt-l", [1, 0.854, 0.577, 0.5]),
        ("fixed-L", [0.25, 0.25, 0.25, 0.25]),
        ("fixed-sqrt-L", [0.5, 0.5, 0.5, 0.5]),
        ("fixed-sqrt-l", [1, 0.707, 0.577, 0.5]),
    ],
)
def test_the_other_schedules_of_prores(schedule: str, at_15: list[float]) -> None:
    assert factors(schedule, 15) == at_15


@pytest.mark.method("prores")
def test_all_schedules_but_the_fixed_end_at_1_and_have_a_table() -> None:
    for schedule in get_args(Schedule):
        if not schedule.startswith("fixed"):
            assert factors(schedule, 40) == [1, 1, 1, 1]
    assert len(get_args(Schedule)) == 11


@pytest.mark.method("prores")
def test_prores_is_the_embedding_at_first_and_pre_ln_after_the_warm_up() -> None:
    stack, plain = laws.at_first(Case("prores", {"base": 10}), LOOPED), laws.at_first(Case("pre-ln"), LOOPED)
    stack.wiring.set_step(0)
    with torch.no_grad():
        x = stack.embedding(TOKENS)
        assert torch.equal(stack(TOKENS).stream, stack.norm(x))
    stack.wiring.set_step(49)
    assert not torch.equal(logits(stack), logits(plain))
    stack.wiring.set_step(50)
    assert torch.equal(logits(stack), logits(plain))


@pytest.mark.method("prores")
def test_prores_warms_early_visits_first() -> None:
    stack = laws.at_first(Case("prores", {"base": 1000}), LOOPED)
    seen: dict[tuple[int, str], torch.Tensor] = {}
    stack.on_site(lambda site, what, tensor: seen.update({(site.index, what): tensor}))
    with torch.no_grad():
        before = stack.embedding(TOKENS)
        stack(TOKENS)
    # step 1500, visits 1 to 5
    for index in range(10):
        share = min(1.0, 1.5 / (index // 2 + 1))
        torch.testing.assert_close(seen[index, "stream"], before + share * seen[index, "update"], rtol=1e-6, atol=1e-6)
        before = seen[index, "stream"]


@pytest.mark.method("prores")
def test_the_step_of_prores_is_saved_and_is_not_negative() -> None:
    stack, other = (laws.at_first(Case("prores"), PLAIN) for _ in range(2))
    other.wiring.set_step(0)
    other.load_state_dict(stack.state_dict())
    assert int(other.state_dict()["wiring.step"]) == 1500
    assert torch.equal(logits(other), logits(stack))
    with pytest.raises(UsageError, match="at least 0, not -1"):
        other.wiring.set_step(-1)


@pytest.mark.method("skipinit")
def test_skipinit_is_rezero_with_a_factor_for_each_site() -> None:
    stack, rezero = laws.changed(Case("skipinit"), LOOPED), laws.changed(Case("rezero", {"per": "site"}), LOOPED)
    assert stack.state_dict()["wiring.factors"].shape == (10,)
    assert torch.equal(logits(stack), logits(rezero))


@pytest.mark.method("skipinit")
def test_skipinit_begins_as_the_identity_and_only_its_factors_learn() -> None:
    stack = laws.at_first(Case("skipinit"), LOOPED)
    result = stack(TOKENS)
    assert torch.equal(result.stream, stack.embedding(TOKENS))
    torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), TOKENS.flatten()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in stack.layers.parameters())
    gradient = stack.wiring.get_parameter("factors").grad
    assert gradient is not None
    assert bool((gradient.abs() > 1e-8).all())


@pytest.mark.method("highway")
@pytest.mark.parametrize("bias", [-1e4, 1e4, 0.0])
def test_a_gate_of_highway_stays_between_the_stream_and_the_output(bias: float) -> None:
    stack = laws.changed(Case("highway"), LOOPED)
    stack.wiring.get_parameter("biases").data += bias
    seen: dict[tuple[int, str], torch.Tensor] = {}

    def keep(site: Any, what: str, tensor: torch.Tensor) -> None:
        seen[site.index, what] = tensor

    stack.on_site(keep)
    with torch.no_grad():
        stack(TOKENS)
        before = stack.embedding(TOKENS)
    for index in range(10):
        output, after = seen[index, "update"], seen[index, "stream"]
        if bias:
            assert torch.equal(after, before if bias < 0 else output)
        else:
            low, high = torch.minimum(before, output), torch.maximum(before, output)
            assert bool(((low - 1e-12 <= after) & (after <= high + 1e-12)).all())
            assert not torch.equal(after, before)
        before = after
