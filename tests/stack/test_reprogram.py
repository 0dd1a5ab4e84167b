"""Another program for a trained stack: what survives, what is new, and constants that follow from depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepen
from deepen.errors import ProgramError, UsageError
from deepen.registry import methods
from deepen.stack.config import StackConfig
from deepen.stack.reprogram import reprogram
from deepen.stack.stack import Stack
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import CASES, LOOPED, PLAIN, Case

NAMES = [method.name for method in methods("wiring")]
TOKENS = laws.tokens()
DEPENDING = {
    "deepnorm": "the wiring deepnorm: alpha is a power of the number of blocks, and the program changes the number of "
    "blocks, from 3 to 2",
    "deeploop": "the wiring deeploop: alpha is a power of the number of blocks",
    "looped-scaling": "the wiring looped-scaling: updates are divided by the rounds",
    "prores": "the wiring prores: each factor follows from the place of a visit among all",
    "stochastic-depth": "the wiring stochastic-depth: each probability follows from the place of a visit among all",
    "depth-scaled-sandwich": "the wiring depth-scaled-sandwich: the gains of the second norms began at",
}


@torch.no_grad()
def logits(model: Stack) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("case", [
    case if not case.options else pytest.param(case, marks=pytest.mark.slow) for case in CASES
], ids=str)  # fmt: skip
def test_the_same_program_is_the_same_model_and_every_parameter_has_a_place(case: Case) -> None:
    stack = laws.changed(case, LOOPED)
    made, report = reprogram(stack, LOOPED)
    assert made is not stack
    assert torch.equal(logits(made), logits(stack))
    assert (report.survived, report.new, report.partly, report.gone) == (10, (), (), ())
    assert set(stack.wiring.entries()) == {name for name, _ in stack.wiring.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_a_shorter_program_keeps_what_belongs_to_its_sites_and_can_be_lengthened_again(name: str) -> None:
    stack = laws.changed(Case(name), "0-2")
    shorter, report = reprogram(stack, "0 2", constants="keep")
    assert (report.sites, report.survived) == (4, 4)
    assert not [each for each in report.new if not each.startswith("wiring.")]
    assert bool(logits(shorter).isfinite().all())
    again, _ = reprogram(shorter, "0-1", constants="keep")
    assert torch.equal(logits(again), logits(shorter))


def test_rows_follow_their_sites() -> None:
    stack = laws.changed(Case("highway"), LOOPED)
    rows = stack.wiring.get_parameter("biases")
    shorter, report = reprogram(stack, "0 2 1 2")
    # the first runs of layers 0, 2 and 1, and the second of layer 2
    assert torch.equal(shorter.wiring.get_parameter("biases"), rows[[0, 1, 4, 5, 2, 3, 8, 9]])
    assert report.carried == ("wiring.maps", "wiring.biases")
    longer, report = reprogram(stack, "0 (1-2)*3")
    found = longer.wiring.get_parameter("biases")
    assert torch.equal(found[:10], rows)
    assert bool((found[10:] == -1).all())
    assert report.partly == ("wiring.maps", "wiring.biases")
    assert "10 of 14 sites survive\npartly: wiring.maps, wiring.biases" in str(report)


def test_parameters_without_a_stated_place_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = laws.changed(Case("highway"), PLAIN)
    monkeypatch.setattr(type(stack.wiring), "entries", lambda self: {})
    same, report = reprogram(stack, PLAIN)
    assert torch.equal(logits(same), logits(stack))
    other, report = reprogram(stack, "1 0 2")
    assert report.new == ("wiring.maps", "wiring.biases")
    assert bool((other.wiring.get_parameter("biases") == -1).all())


def test_weights_of_sources_follow_their_visits() -> None:
    stack = laws.changed(Case("denseformer"), PLAIN)
    weights = {name: value.detach() for name, value in stack.wiring.named_parameters()}
    shorter, report = reprogram(stack, "0 2")
    found = dict(shorter.wiring.named_parameters())
    assert torch.equal(found["weights.0"], weights["weights.0"])
    # X_0, what layer 0 left and what layer 2 left
    assert torch.equal(found["weights.1"], weights["weights.2"][[0, 1, 3]])
    assert report.gone == ("wiring.weights.1",)


@pytest.mark.parametrize(
    "name", ["pre-ln", "denseformer", "lime", "hyper-connections", "rezero", "skipinit", "layer-scale", "short-swa"]
)
def test_a_copy_that_adds_nothing_changes_nothing(name: str) -> None:
    stack = laws.changed(Case(name), PLAIN)
    longer, report = reprogram(stack, "0 0!zero 1 1!zero 2")
    laws.close(logits(longer), logits(stack))
    assert (report.sites, report.survived) == (10, 6)


def test_copies_and_what_a_program_owns_are_told() -> None:
    stack = laws.changed(Case("pre-ln"), "0 1[lora=2] 2")
    made, report = reprogram(stack, "0 1[lora=2] 2!rand 2!")
    assert torch.equal(made.layers[3].get_parameter("a.norm.weight"), stack.layers[2].get_parameter("a.norm.weight"))
    assert report.new == ("layers.2",)
    assert all(name.startswith("owned.lora.") for name in report.carried)
    for program in ("0-1 2[lora=2]", "1 0[lora=2] 2"):
        _, report = reprogram(stack, program)
        assert report.new
        assert all(name.startswith("owned.lora.") for name in report.new)


@pytest.mark.parametrize("name", DEPENDING)
def test_constants_of_depth_are_never_changed_silently(name: str) -> None:
    stack = laws.changed(Case(name), PLAIN)
    with pytest.raises(UsageError) as found:
        reprogram(stack, "0 2")
    assert str(found.value).startswith(DEPENDING[name])
    assert "choose constants='keep' for those of the trained stack, or constants='rescale'" in str(found.value)
    kept, report = reprogram(stack, "0 2", constants="keep")
    rescaled, other = reprogram(stack, "0 2", constants="rescale")
    assert (report.constants, other.constants) == ("keep", "rescale")
    for model in (kept, rescaled, stack):
        model.train()
    torch.manual_seed(0)
    first = logits(kept)
    torch.manual_seed(0)
    assert not torch.allclose(first, logits(rescaled))
    # what is kept is part of the configuration, and is kept again
    again = Stack(StackConfig.read(kept.config.model_dump(mode="json"))).double()
    again.load_state_dict(kept.state_dict())
    again.train()
    torch.manual_seed(0)
    assert torch.equal(logits(again), first)
    assert reprogram(kept, "0-1", constants="keep")[0].config.depth == kept.config.depth


def test_a_factor_of_a_parametrisation_is_a_constant_of_depth() -> None:
    config = StackConfig(layers=4, width=8, heads=2, parametrisation="depth-mup")
    stack: Any = Stack(config)
    with pytest.raises(UsageError, match="the parametrisation depth-mup: its factors follow from depth"):
        deepen.reprogram(stack, "0-1")
    kept: Any = deepen.reprogram(stack, "0-1", constants="keep")[0]
    assert kept._factors == stack._factors[:4]
    rescaled: Any = deepen.reprogram(stack, "0-1", constants="rescale")[0]
    assert rescaled._factors != kept._factors


def test_kept_and_rescaled_values() -> None:
    stack: Any = laws.changed(Case("deepnorm"), PLAIN)
    assert reprogram(stack, "0 2", constants="keep")[0].wiring.alpha == stack.wiring.alpha == 6**0.25  # pyright: ignore
    assert reprogram(stack, "0 2", constants="rescale")[0].wiring.alpha == 4**0.25  # pyright: ignore
    dropped: Any = laws.changed(Case("stochastic-depth", {"last": 0.4}), PLAIN)
    # 1 - l / 3 * 0.6, of the first and the third visit
    kept: Any = reprogram(dropped, "0 2", constants="keep")[0]
    assert kept.wiring.keep == pytest.approx((0.8, 0.8, 0.4, 0.4))
    assert reprogram(dropped, "0 2", constants="rescale")[0].wiring.keep == pytest.approx((0.7, 0.7, 0.4, 0.4))  # pyright: ignore
    looped: Any = laws.changed(Case("looped-scaling"), "0-2")
    longer: Any = reprogram(looped, "0 (1)*2 2", constants="keep")[0]
    assert longer.wiring.factors == pytest.approx([3**-0.5] * 8)
    longer = reprogram(looped, "0 (1)*2 2", constants="rescale")[0]
    assert longer.wiring.factors == pytest.approx([3**-0.5 / (1, 2, 2, 1)[place // 2] for place in range(8)])


def test_trained_gains_that_began_with_depth_can_move_with_it() -> None:
    stack = laws.changed(Case("depth-scaled-sandwich"), PLAIN)
    gain = stack.layers[2].get_parameter("a.after.weight")
    kept, rescaled = (reprogram(stack, "0 2", constants=how)[0].layers[1] for how in ("keep", "rescale"))  # pyright: ignore
    assert torch.equal(kept.get_parameter("a.after.weight"), gain)
    torch.testing.assert_close(rescaled.get_parameter("a.after.weight"), gain * (3 / 2) ** 0.5)


@pytest.mark.slow
def test_gains_of_layer_scale_move_where_their_first_value_does() -> None:
    deep = Stack(StackConfig(layers=20, width=2, heads=1, wiring="layer-scale"))
    shallow = reprogram(deep, "0-9", constants="rescale")[0].wiring.get_parameter("gains")
    torch.testing.assert_close(shallow, torch.full_like(shallow, 0.1))
    # from 20 to 21 blocks the value stays
    deeper = reprogram(deep, "0-19 0")[0].wiring.get_parameter("gains")
    assert bool((deeper == 1e-5).all())


def test_an_order_of_the_same_depth_asks_nothing() -> None:
    stack = laws.changed(Case("deepnorm"), PLAIN)
    made, report = reprogram(stack, "2 0 1")
    assert (report.survived, report.constants, made.config.depth) == (6, None, None)
    with pytest.raises(UsageError, match="the places of visits"):
        reprogram(laws.changed(Case("prores"), PLAIN), "2 0 1")


def test_bad_programs_and_a_depth_of_another_program() -> None:
    with pytest.raises(ProgramError, match="the wiring denseformer cannot carry"):
        reprogram(laws.changed(Case("denseformer"), PLAIN), "0 {1|2}")
    with pytest.raises(ProgramError, match="layer 3 does not exist"):
        reprogram(laws.changed(Case("pre-ln"), PLAIN), "0-3")
    kept, _ = reprogram(laws.changed(Case("deepnorm"), PLAIN), "0 2", constants="keep")
    with pytest.raises(UsageError, match="depth is of a program of 4 sites, this one has 2"):
        Stack(kept.config.model_copy(update={"program": "0"}))
