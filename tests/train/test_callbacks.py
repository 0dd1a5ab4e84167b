"""Growth, schedules of depth, noise, rotation, and the rate over the steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.train.curriculum import Curriculum
from deepen.train.depth import Depth
from deepen.train.growth import Grow, Stage, grown, guideline_steps
from deepen.train.learner import Learner
from deepen.train.noise import GradientNoise
from deepen.train.rotation import Rotation
from deepen.train.schedule import Scheduled
from deepen.wiring.prores import ProRes
from deepen.wiring.stochastic_depth import RandomDepth

SMALL = {"layers": 3, "width": 16, "heads": 2, "vocabulary": 11}


def stack(**fields: object) -> Stack:
    return Stack(StackConfig.read({**SMALL, **fields}), seed=2)


@pytest.mark.parametrize(("order", "origin"), [("whole", lambda i: i % 3), ("interleaved", lambda i: i // 2)])
def test_layers_of_a_grown_stack_are_copies_and_run_as_a_loop_would(order: object, origin: object) -> None:
    small = stack()
    large, origins = grown(small, 2, order)  # pyright: ignore[reportArgumentType]
    assert large.config.layers == 6
    for i in range(6):
        name = f"layers.{i}.f.sublayer.up.weight"
        assert origins[name] == f"layers.{origin(i)}.f.sublayer.up.weight"  # pyright: ignore[reportCallIssue]
        assert large.get_parameter(name) is not small.get_parameter(origins[name])
    program = "(0-2)*2" if order == "whole" else "(0)*2 (1)*2 (2)*2"
    looped = stack(program=program)
    looped.load_state_dict(small.state_dict())
    ids = torch.randint(0, 11, (2, 7))
    assert torch.equal(large(ids).logits, looped(ids).logits)
    assert not torch.equal(large(ids).logits, small(ids).logits)


def test_growth_carries_which_parameter_each_began_as_unless_it_starts_anew() -> None:
    for carry in (True, False):
        learner = Learner(stack())
        before = dict(learner.stack.named_parameters())
        callback = Grow(learner, (Stage(step=4, factor=2, carry=carry),))
        assert callback.before(3) is None
        born = callback.before(4)
        assert born is not None
        now = dict(learner.stack.named_parameters())
        if carry:
            assert born[now["layers.4.a.sublayer.out.weight"]] is before["layers.1.a.sublayer.out.weight"]
            assert born[now["embedding.weight"]] is before["embedding.weight"]
            assert set(born) == set(learner.stack.parameters())
        else:
            assert not born


def test_a_resumed_run_has_grown_as_often_as_the_state_was_trained_after() -> None:
    stages = (Stage(step=4, factor=2), Stage(step=8, factor=2))
    for done, layers in ((4, 3), (5, 6), (8, 6), (9, 12)):
        learner = Learner(stack())
        Grow(learner, stages).begin(done)
        assert learner.stack.config.layers == layers


def test_wirings_with_parameters_of_visits_do_not_grow() -> None:
    with pytest.raises(UsageError, match="has no like in the smaller stack"):
        grown(stack(wiring="layer-scale"), 2)
    assert grown(stack(wiring="prores"), 2)[0].config.layers == 6


def test_the_guideline_is_that_of_the_paper_and_refused_where_it_asks_for_too_much() -> None:
    class Big:
        layers = nn.ModuleList([nn.Linear(1750, 1000, bias=False)])

    # 7e9 parameters on 2e12 tokens, scaled: the count of parameters is that of the layers times the factor
    with pytest.raises(UsageError, match=r"grows after .* tokens, the run has"):
        guideline_steps(stack(), 4, 1000, 100)
    big = Big()
    found = guideline_steps(big, 4000, 2_000_000, 1_000_000)  # pyright: ignore[reportArgumentType]
    assert found * 2e6 == pytest.approx(11.11e9, rel=1e-2)


def test_prores_is_told_the_step_and_the_chance_to_drop_rises_to_its_own() -> None:
    learner = Learner(stack(wiring="prores"))
    told = Depth(learner, steps=10, seed=0)
    told.before(7)
    assert isinstance(learner.stack.wiring, ProRes)
    assert int(learner.stack.wiring.step) == 7
    learner = Learner(stack(wiring={"name": "layer-drop", "drop": 0.4}))
    told = Depth(learner, steps=10, seed=0, dropping=0.5)
    seen = []
    for step in (0, 2, 4, 9):
        told.before(step)
        assert isinstance(learner.stack.wiring, RandomDepth)
        seen.append(learner.stack.wiring.keep[0])
    assert seen == pytest.approx([1 - 0.4 / 5, 1 - 0.4 * 3 / 5, 0.6, 0.6])
    with pytest.raises(UsageError, match="pre-ln drops nothing"):
        Depth(Learner(stack()), steps=10, seed=0, dropping=0.5)


def test_turns_are_drawn_in_training_and_run_their_maximum_elsewhere() -> None:
    learner = Learner(stack(program="0 (1)*1..6 2"))
    told = Depth(learner, steps=10, seed=0, turns=Curriculum(mean=2, share=0))
    ids, drawn = torch.randint(0, 11, (2, 5)), set()
    for step in range(12):
        told.before(step)
        assert learner.counts is not None
        (count,) = learner.counts.values()
        drawn.add(count)
        learner.train()
        assert torch.equal(learner(ids).logits, learner.stack(ids, counts={0: count}).logits)
    assert len(drawn) > 2
    learner.eval()
    assert torch.equal(learner(ids).logits, learner.stack(ids, counts={0: 6}).logits)
    with pytest.raises(UsageError, match="has none"):
        Depth(Learner(stack()), steps=10, seed=0, turns=Curriculum(mean=2))


@pytest.mark.method("gradient-noise")
def test_noise_has_the_deviation_of_the_formula_and_a_generator_of_its_own() -> None:
    noise = GradientNoise(0.01, seed=5)
    assert noise.deviation(0) == pytest.approx(0.1)
    assert noise.deviation(99) == pytest.approx(0.02818, abs=1e-5)
    weights = {"a": nn.Parameter(torch.zeros(300, 300)), "b": nn.Parameter(torch.zeros(3))}

    def added(step: int, made: GradientNoise) -> list[torch.Tensor]:
        weights["a"].grad, weights["b"].grad = torch.ones(300, 300), None
        made.gradients(step, weights)
        assert weights["b"].grad is None
        assert weights["a"].grad is not None
        return [weights["a"].grad - 1]

    state = torch.random.get_rng_state()
    for step in (0, 99):
        (drawn,) = added(step, noise)
        assert drawn.std().item() == pytest.approx(noise.deviation(step), rel=0.02)
        assert abs(drawn.mean().item()) < 4 * noise.deviation(step) / 300
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(added(3, noise)[0], added(3, GradientNoise(0.01, seed=5))[0])
    assert not torch.equal(added(3, noise)[0], added(3, GradientNoise(0.01, seed=6))[0])
    assert added(3, GradientNoise(0.0, seed=5))[0].abs().max() == 0


@pytest.mark.method("layer-rotation")
def test_rotation_is_the_cosine_to_the_initial_matrices() -> None:
    learner = Learner(stack())
    rotation = Rotation(learner)
    assert rotation.measures() == pytest.approx({f"rotation.{i}": 0.0 for i in range(3)}, abs=1e-7)
    layer = learner.stack.layers[1]
    with torch.no_grad():
        # lengths, norms and biases do not count
        learner.stack.layers[0].a.norm.weight.fill_(7.0)
        for parameter in learner.stack.layers[0].parameters():
            parameter.mul_(3.0)
        matrices = [each for each in layer.parameters() if each.ndim > 1]
        whole = torch.cat([each.flatten() for each in matrices]).double()
        for each in matrices:
            each.add_(0.02 * torch.randn_like(each))
        for each in learner.stack.layers[2].parameters():
            each.neg_()
    now = torch.cat([each.detach().flatten() for each in matrices]).double()
    cosine = float(whole @ now / (whole.norm() * now.norm()))
    assert rotation.measures() == pytest.approx(
        {"rotation.0": 0.0, "rotation.1": 1 - cosine, "rotation.2": 2.0}, abs=1e-6
    )
    Grow(learner, (Stage(step=1, factor=2),), rotation).before(1)
    found = rotation.measures()
    assert [found[f"rotation.{i}"] for i in (3, 4, 5)] == [found[f"rotation.{i}"] for i in (0, 1, 2)]


def test_rates_of_the_schedules_and_of_a_new_rise_after_growth() -> None:
    wsd = Scheduled(steps=100, warmup=10, lr=2.0, floor=0.1, schedule="wsd", decay=0.4)
    assert [wsd.lr_at(step) for step in (0, 9, 30, 60)] == pytest.approx([0.2, 2.0, 2.0, 2.0])
    assert wsd.lr_at(80) == pytest.approx(2.0 * 0.55)
    assert wsd.lr_at(100) == pytest.approx(0.2)
    level = Scheduled(steps=100, warmup=0, lr=2.0, schedule="constant", grown=(50,), rewarm=4)
    assert [level.lr_at(step) for step in (0, 49, 50, 52, 53, 99)] == pytest.approx([2.0, 2.0, 0.5, 1.5, 2.0, 2.0])
    cosine = Scheduled(steps=110, warmup=10, lr=1.0, floor=0.2)
    assert cosine.lr_at(60) == pytest.approx(0.6)
    assert math.isclose(cosine.lr_at(9), 1.0)
