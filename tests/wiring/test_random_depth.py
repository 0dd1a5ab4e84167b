"""Updates and layers that are dropped at random in training: stochastic depth and LayerDrop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.wiring.base import Earlier
from deepen.wiring.layer_drop import kept
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import PLAIN, Case

TOKENS = laws.tokens()
SIZES: dict[str, Any] = {"width": 8, "heads": 2, "vocabulary": 29}


def written(stack: Stack, x: torch.Tensor, outputs: list[float]) -> torch.Tensor:
    """The stream after sites whose outputs are constants."""
    wiring = stack.wiring
    state = wiring.init(x, Earlier())
    for site, output in zip(wiring.shape.sites, outputs, strict=True):
        state = wiring.write(state, site, wiring.read(state, site), torch.full_like(x, output), torch.nn.Identity())
    return wiring.finish(state)


@pytest.mark.method("stochastic-depth")
@pytest.mark.parametrize("form", ["inverted", "paper"])
def test_the_mean_over_draws_is_the_stream_outside_of_training(form: str) -> None:
    stack = Stack(StackConfig(layers=3, wiring={"name": "stochastic-depth", "form": form}, **SIZES))
    x, outputs = torch.zeros(20000, 1, 1), [1.0, -2.0, 3.0, 0.5, -1.0, 4.0]
    torch.manual_seed(0)
    drawn = written(stack.train(), x, outputs)
    plain = written(stack.eval(), x, outputs)
    assert len(drawn.unique()) > 20
    assert len(plain.unique()) == 1
    # 20000 draws of a deviation of at most 6
    assert abs(float(drawn.mean() - plain.mean())) < 0.15
    assert float(plain[0]) == pytest.approx(5.5 if form == "inverted" else -5 / 6 + 3.5 * 2 / 3 + 1.5, abs=1e-5)


@pytest.mark.method("stochastic-depth")
def test_stochastic_depth_keeps_late_visits_less_often() -> None:
    wiring: Any = Stack(StackConfig(layers=54, wiring="stochastic-depth", **SIZES)).wiring
    assert wiring.keep[0] == wiring.keep[1] == pytest.approx(1 - 0.5 / 54)
    assert wiring.keep[-1] == 0.5
    assert sum(wiring.keep[::2]) == pytest.approx(40.25)


@pytest.mark.method("stochastic-depth")
def test_stochastic_depth_that_keeps_all_is_pre_ln_in_training_and_draws_follow_the_generator() -> None:
    all_, plain = laws.at_first(Case("stochastic-depth", {"last": 1.0}), PLAIN), laws.at_first(Case("pre-ln"), PLAIN)
    some = laws.at_first(Case("stochastic-depth"), PLAIN).train()
    with torch.no_grad():
        assert torch.equal(all_.train()(TOKENS).logits, plain(TOKENS).logits)
        torch.manual_seed(3)
        first, second = some(TOKENS).logits, some(TOKENS).logits
        torch.manual_seed(3)
        assert torch.equal(some(TOKENS).logits, first)
    assert not torch.equal(first, second)


@pytest.mark.method("stochastic-depth")
@pytest.mark.parametrize("per", ["sequence", "batch"])
def test_sequences_draw_for_themselves_or_together(per: str) -> None:
    stack = Stack(StackConfig(layers=3, wiring={"name": "stochastic-depth", "per": per}, **SIZES)).train()
    torch.manual_seed(0)
    found = written(stack, torch.zeros(50, 1, 1), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert (len(found.unique()) > 1) == (per == "sequence")


@pytest.mark.method("layer-drop")
def test_layers_are_dropped_whole_at_the_stated_rate_and_nothing_is_rescaled() -> None:
    stack = Stack(StackConfig(layers=2, wiring={"name": "layer-drop", "drop": 0.25}, **SIZES)).train()
    torch.manual_seed(0)
    draws = [float(written(stack, torch.zeros(3, 1, 1), [1.0, 2.0, 10.0, 20.0]).unique()) for _ in range(1000)]
    assert set(draws) == {0, 3, 30, 33}
    for size in (3, 30):
        share = sum(value in (size, 33) for value in draws) / 1000
        assert abs(share - 0.75) < 0.06
    assert float(written(stack.eval(), torch.zeros(1, 1, 1), [1.0, 2.0, 10.0, 20.0])) == 33


@pytest.mark.method("layer-drop")
def test_a_program_of_the_kept_layers_is_the_model_of_these_layers() -> None:
    assert kept(12, 0.5) == [0, 2, 4, 6, 8, 10]
    assert kept(12, 0.25) == [layer for layer in range(12) if layer not in (3, 7, 11)]
    for drop in (0.0, 0.6):
        with pytest.raises(UsageError, match="above 0 and at most 1/2"):
            kept(12, drop)
    fields: dict[str, Any] = {**SIZES, "wiring": "layer-drop"}
    whole = Stack(StackConfig(layers=6, **fields)).eval()
    pruned = Stack(StackConfig(layers=6, program=" ".join(map(str, kept(6, 0.5))), **fields)).eval()
    small = Stack(StackConfig(layers=3, **fields)).eval()
    for model in (pruned, small):
        model.embedding.load_state_dict(whole.embedding.state_dict())
        for own, layer in zip(model.layers, (0, 2, 4), strict=True):
            own.load_state_dict(whole.layers[layer].state_dict())
    with torch.no_grad():
        assert torch.equal(pruned(TOKENS).logits, small(TOKENS).logits)
        assert not torch.equal(pruned(TOKENS).logits, whole(TOKENS).logits)
