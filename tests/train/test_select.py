"""What a run trains, on models of several families: LoRA beside the matrices of layers, or the layers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepen
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import UsageError
from deepen.train.loop import seeded, train
from deepen.train.losses import CrossEntropy
from deepen.train.optim import trained
from deepen.train.recipe import Recipe
from deepen.train.select import add_lora, select_layers
from tests.train.text_model import weights

RECIPE = Recipe(steps=5, batch=2, lr=1e-2, warmup=0, eval_every=0, weight_decay=0.5)
FAMILIES = ("llama", "gpt2", "gpt_neox", "falcon", "gemma2", "qwen3_moe", "mamba")
LOOP = "0-1 (2-3)*2 4-5"


def looped(place: Path, family: str) -> tuple[deepen.Checkpoint, torch.nn.Module]:
    tiny_checkpoint(place / family, family)
    ck = deepen.open(place / family).apply(LOOP)
    # rounding grows in the exponentials of mamba; experts have no kernel in fp64
    return ck, ck.load(dtype="float64" if family == "mamba" else "float32")


@pytest.mark.method("lora")
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_begins_at_the_model_moves_nothing_of_it_and_merges(family: str, tmp_path: Path) -> None:
    ck, model = looped(tmp_path, family)
    tower, inputs = ck.family.tower("").name, tiny_inputs(model)
    before, held = output_of(model, inputs), weights(model)
    with seeded(0):
        adapters = add_lora(model, 2, tower)
    assert torch.equal(output_of(model, inputs), before)
    names = list(trained(model))
    assert all(".lora_" in name for name in names)
    ids = inputs["input_ids"]
    losses = train(model, lambda _: ids, RECIPE, loss=CrossEntropy()).losses
    assert losses[-1] < losses[0]
    now = {name.replace(".base_layer.", "."): each for name, each in weights(model).items()}
    assert all(torch.equal(now[name], each) for name, each in held.items())
    apart = output_of(model, inputs)
    assert not torch.allclose(apart, before, atol=1e-3)
    adapters.merge_and_unload()
    assert list(weights(model)) == list(held)
    scale = max(1.0, apart.abs().max().item())
    assert (output_of(model, inputs) - apart).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_chosen_layers_move(family: str, tmp_path: Path) -> None:
    ck, model = looped(tmp_path, family)
    select_layers(model, [3, 5], ck.family.tower("").name)
    held, ids = weights(model), tiny_inputs(model)["input_ids"]
    train(model, lambda _: ids, RECIPE, loss=CrossEntropy())
    moved = {name for name, each in weights(model).items() if not torch.equal(each, held[name])}
    assert moved
    assert {int(next(piece for piece in name.split(".") if piece.isdecimal())) for name in moved} == {3, 5}


def test_lora_of_some_layers_only(tmp_path: Path) -> None:
    ck, model = looped(tmp_path, "llama")
    add_lora(model, 2, ck.family.tower("").name, [1])
    assert {name.split(".layers.")[1].split(".")[0] for name in trained(model)} == {"1"}


def test_a_rank_above_the_smallest_matrix_is_refused(tmp_path: Path) -> None:
    ck, model = looped(tmp_path, "llama")
    for rank in (0, 17):
        with pytest.raises(UsageError, match=rf"--rank {rank}: expected 1 to 16, .*k_proj"):
            add_lora(model, rank, ck.family.tower("").name)
