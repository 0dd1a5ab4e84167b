"""Depth up-scaling: a stretch twice, the second time through copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.recipe import Recipe
from tests.surgery.cases import checkpoint, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "bert", "opt", "mamba", "qwen3_moe")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("upscale") / "llama", "llama")


@pytest.mark.method("upscale")
@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_at_the_visits_without_copies_and_half_is_the_original(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    deep, told = deepen.upscale(ck, drop=2, measure=True)
    assert (told.after, told.same_as) == ("0-3 2! 3! 4-5", "0-3 2-5")
    assert (told.copied, told.dropped, told.max_logit_difference) == (("2!1", "3!1"), (), 0.0)
    assert torch.equal(outputs(deep), outputs(ck.apply("0-3 2-5")))
    assert off(outputs(deep), outputs(ck)) > 1e-3
    same, _ = deepen.upscale(ck, drop=3)
    assert same.program == ck.program
    assert torch.equal(outputs(same), outputs(ck))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_it_is_saved_with_a_tensor_of_its_own_for_each_layer(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    deep, _ = deepen.upscale(ck, first=1, last=3)
    told = deep.save(tmp_path / "deep")
    assert told.form == "plain"
    assert list(told.layers.values()) == [(0, 1, 2, 3, 1, 2, 3, 4, 5)]
    again = deepen.open(tmp_path / "deep")
    assert torch.equal(outputs(again), outputs(deep))
    assert again.cost().params == deep.cost().params > ck.cost().params


def test_both_forms_give_48_layers_of_32_with_the_seam_between_23_and_8(tmp_path: Path) -> None:
    from deepen.checkpoint.tiny import tiny_checkpoint

    tiny_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=32)
    ck = deepen.open(tmp_path / "llama")
    deep, told = deepen.upscale(ck, drop=8)
    layers = [visit.key.layer for visit in deep.plan().visits]
    assert layers == [*range(24), *range(8, 32)]
    assert (len(layers), layers[23:25]) == (48, [23, 8])
    assert "layer 8 comes after layer 23" in told.note
    ranged, _ = deepen.upscale(ck, first=12, last=27)
    assert [visit.key.layer for visit in ranged.plan().visits] == [*range(28), *range(12, 32)]
    assert deepen.upscale(ck, first=8, last=23)[0].program == deep.program


def test_training_a_copy_leaves_its_layer_alone(llama: Checkpoint) -> None:
    deep, _ = deepen.upscale(llama, drop=2)
    model: Any = deep.load()
    layers = {str(key): model.model.layers._modules[child] for child, key in model.deepen.keys().items()}
    held = {name: each.detach().clone() for name, each in layers["2"].named_parameters()}
    model.requires_grad_(False)
    layers["2!1"].requires_grad_(True)
    ids = tiny_inputs(model)["input_ids"]
    train(model, lambda _: ids, Recipe(steps=2, batch=2, lr=1e-2, eval_every=0), loss=CrossEntropy())
    for name, each in layers["2"].named_parameters():
        assert torch.equal(each, held[name])
        assert each.data_ptr() != layers["2!1"].get_parameter(name).data_ptr()
    assert any(not torch.equal(each, held[name]) for name, each in layers["2!1"].named_parameters())


def test_cached_decoding_and_a_program_that_was_cut_before(llama: Checkpoint) -> None:
    cut, _ = deepen.drop(llama, [2])
    deep, told = deepen.upscale(cut, drop=1)
    assert (told.before, told.after) == ("0-1 3-5", "0-1 3-4 1! 3! 4! 5")
    model = deep.load()
    inputs = tiny_inputs(model, tokens=16)
    assert off(step_by_step(model, inputs, 4), output_of(model, inputs)) < 1e-5


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.upscale(ck, drop=4), UsageError, "6 visits drop 0 to 3 at their seam, got 4"),
        (lambda ck: deepen.upscale(ck, drop=-1), UsageError, "drop 0 to 3 at their seam, got -1"),
        (lambda ck: deepen.upscale(ck), UsageError, "either drop=, or first= and last="),
        (lambda ck: deepen.upscale(ck, drop=1, first=2, last=3), UsageError, "either drop=, or first= and last="),
        (lambda ck: deepen.upscale(ck, first=2), UsageError, "either drop=, or first= and last="),
        (lambda ck: deepen.upscale(ck, first=2, last=6), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.upscale(ck, first=3, last=2), ProgramError, "layer 3 is visited after layer 2"),
        (lambda ck: deepen.upscale(ck.apply("0-2 4-5"), first=3, last=4), ProgramError, "layer 3 is visited nowhere"),
        (lambda ck: deepen.upscale(ck.apply("0 (1-4)*2 5"), drop=1), ProgramError, "not a plain list of layers"),
        (lambda ck: deepen.upscale(ck, drop=1, tower="vision"), FamilyError, "no tower 'vision'"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)
