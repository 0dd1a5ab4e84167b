"""Stacking: copies of layers in several orders, and when to stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.errors import ProgramError, UsageError
from tests.surgery.cases import checkpoint, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "bert", "opt", "mamba", "qwen3_moe")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("stack") / "llama", "llama")


@pytest.mark.method("g-stack")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_begins_at_the_loop_and_shares_no_weights(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    grown, told = deepen.g_stack(ck, 2, measure=True)
    assert (told.after, told.same_as, told.max_logit_difference) == ("(0-5)*!2", "(0-5)*2", 0.0)
    assert told.shared == ()
    assert torch.equal(outputs(grown), outputs(ck.apply("(0-5)*2")))
    assert off(outputs(grown), outputs(ck)) > 1e-3
    grown.save(tmp_path / "grown")
    again = deepen.open(tmp_path / "grown")
    assert list(again.depth.values()) == [12]
    assert torch.equal(outputs(again), outputs(grown))


def test_layer_7_is_layer_1_but_not_the_same_object(llama: Checkpoint) -> None:
    layers = list(deepen.g_stack(llama, 4)[0].load().model.layers._modules.values())
    assert len(layers) == 24
    for name, each in layers[7].named_parameters():
        one = layers[1].get_parameter(name)
        assert torch.equal(each, one)
        assert each.data_ptr() != one.data_ptr()
    assert not torch.equal(next(layers[8].parameters()), next(layers[1].parameters()))


@pytest.mark.parametrize(("call", "layers"), [
    (lambda ck: deepen.g_stack(ck, 3), [0, 1, 2, 3, 4, 5] * 3),
    (lambda ck: deepen.g_stack(ck, 2, order="interleaved"), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    (lambda ck: deepen.stack_list(ck, [2, 0, 2, 2, 5]), [2, 0, 2, 2, 5]),
    (lambda ck: deepen.stack_last(ck, 2), [0, 1, 2, 3, 4, 5, 4, 5]),
    (lambda ck: deepen.stack_last(ck, 6), [0, 1, 2, 3, 4, 5] * 2),
    (lambda ck: deepen.stack_middle(ck, 2), [0, 1, 2, 3, 2, 3, 4, 5]),
    (lambda ck: deepen.stack_middle(ck, 3), [0, 1, 2, 0, 1, 2, 3, 4, 5]),
    (lambda ck: deepen.stack_middle(ck, 1), [0, 1, 2, 2, 3, 4, 5]),
    (lambda ck: deepen.stack_middle(ck, 4, blocks=False), [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]),
    (lambda ck: deepen.stack_middle(ck, 3, blocks=False), [0, 1, 2, 3, 1, 2, 3, 4, 5]),
])  # fmt: skip
def test_which_layer_comes_where(llama: Checkpoint, call, layers: list[int]) -> None:
    grown, _ = call(llama)
    keys = [visit.key for visit in grown.plan().visits]
    assert [key.layer for key in keys] == layers
    assert len(set(keys)) == len(keys)
    assert torch.equal(outputs(grown), outputs(llama.apply(" ".join(map(str, layers)))))


@pytest.mark.method("stack-list")
def test_a_list_of_each_layer_once_is_the_identity(llama: Checkpoint) -> None:
    assert deepen.stack_list(llama, range(6))[0].program == llama.program
    assert deepen.stack_list(llama, [*range(6)] * 2)[0].plan().keys == deepen.g_stack(llama, 2)[0].plan().keys


@pytest.mark.method("stack-last")
def test_gradual_stacking_takes_the_last_layers_of_what_it_made(llama: Checkpoint, tmp_path: Path) -> None:
    assert deepen.stack_last(llama, 0)[0].program == llama.program
    deepen.stack_last(llama, 2)[0].save(tmp_path / "eight")
    eight = deepen.open(tmp_path / "eight")
    ten, told = deepen.stack_last(eight, 2)
    assert told.after == "0-7 6! 7!"
    assert torch.equal(outputs(ten), outputs(llama.apply("0-5 4-5 4-5")))


@pytest.mark.method("stack-middle")
def test_the_middle_stays_the_middle_as_the_model_grows(llama: Checkpoint, tmp_path: Path) -> None:
    assert deepen.stack_middle(llama, 0)[0].program == llama.program
    ck = llama
    for stage in (8, 10, 12):
        grown, told = deepen.stack_middle(ck, 2)
        layers = [visit.key.layer for visit in grown.plan().visits]
        first = next(at for at, layer in enumerate(layers) if layers.count(layer) == 2)
        before, after = first, len(layers) - first - 4
        assert abs(before - after) == (0 if (stage // 2) % 2 == 0 else 2), told.after
        grown.save(tmp_path / f"{stage}")
        ck = deepen.open(tmp_path / f"{stage}")
    assert list(ck.depth.values()) == [12]


def test_once_is_the_identity_and_programs_with_loops_are_stacked_too(llama: Checkpoint) -> None:
    assert deepen.g_stack(llama, 1)[0] is llama
    looped, told = deepen.g_stack(llama.apply("0 (1-2)*2 3"), 2)
    assert told.shared == ("1", "2", "1!1", "2!1")
    assert torch.equal(outputs(looped), outputs(llama.apply("(0 (1-2)*2 3)*2")))


@pytest.mark.parametrize(
    ("parameters", "tokens", "expected"),
    [(8e9, 15e12, 6.58), (7e9, 2e12, 11.11), (13e9, 2e12, 15.84), (70e9, 2e12, 42.48)],
)
def test_the_guideline_gives_the_published_figures(parameters: float, tokens: float, expected: float) -> None:
    assert round(deepen.growth_tokens(parameters, 6 * parameters * tokens) / 1e9, 2) == expected


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.g_stack(ck, 0), UsageError, "stacked once or more, got 0"),
        (
            lambda ck: deepen.g_stack(ck, 2, order=cast("Any", "hole")),
            UsageError,
            "no order 'hole'.*'whole'",
        ),
        (lambda ck: deepen.g_stack(ck, 1000), ProgramError, "the limit is 4096"),
        (lambda ck: deepen.stack_list(ck, []), UsageError, "got an empty list"),
        (lambda ck: deepen.stack_list(ck, [0, 6]), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.stack_last(ck, 7), UsageError, "expected 0 to 6 layers, .* got 7"),
        (lambda ck: deepen.stack_last(ck, -1), UsageError, "expected 0 to 6 layers, .* got -1"),
        (lambda ck: deepen.stack_middle(ck, 4), UsageError, "6 layers are no blocks of 4; choose a divisor"),
        (lambda ck: deepen.stack_middle(ck, 7), UsageError, "expected 0 to 6 layers, .* got 7"),
        (lambda ck: deepen.growth_tokens(0, 1e20), UsageError, "parameters is a number above 1, got 0"),
        (lambda ck: deepen.growth_tokens(1e9, float("nan")), UsageError, "flops is a number above 1, got nan"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)
