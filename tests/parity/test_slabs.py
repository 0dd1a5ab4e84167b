"""Tensors outside the layers with one block a layer: Gemma 3n's per-layer embeddings, ESM's contact head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EsmConfig, EsmForMaskedLM

import deepen
from deepen.checkpoint.load import quiet
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_config, tiny_inputs
from deepen.errors import FamilyError

EMBEDDINGS = "model.embed_tokens_per_layer.weight"


def made(tmp_path: Path, model_type: str, **changes: Any) -> tuple[Any, Any]:
    with quiet():
        model = tiny_checkpoint(tmp_path / "m", model_type, **changes)
    return model, deepen.open(tmp_path / "m")


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_a_plain_save_keeps_the_blocks_of_its_layers(tmp_path: Path, model_type: str) -> None:
    model, ck = made(tmp_path, model_type)
    short = ck.apply("0 2-5")
    changes = short.save(tmp_path / "out")
    assert changes.form == "plain"
    blocks = load_file(tmp_path / "m" / "model.safetensors")[EMBEDDINGS].chunk(6, 1)
    kept = load_file(tmp_path / "out" / "model.safetensors")[EMBEDDINGS]
    assert torch.equal(kept, torch.cat([blocks[index] for index in (0, 2, 3, 4, 5)], 1))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.config.num_kv_shared_layers == 2
    inputs = tiny_inputs(model)
    torch.testing.assert_close(output_of(plain.eval(), inputs), output_of(short.load(), inputs))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_a_loop_stores_each_block_once(tmp_path: Path, model_type: str) -> None:
    _, ck = made(tmp_path, model_type)
    looped = ck.apply("0 (1-3)*3 4-5")
    model = looped.load()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ck.load().parameters())
    assert looped.cost().params == ck.cost().params
    assert ck.apply("0-3").cost().params < ck.cost().params


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_generation_with_the_cache_equals_generation_without(tmp_path: Path, model_type: str) -> None:
    model, ck = made(tmp_path, model_type)
    looped = ck.apply("0 (1-3)*2 4-5").load()
    ids = tiny_inputs(model)["input_ids"]
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(looped.generate(ids, **arguments), looped.generate(ids, use_cache=False, **arguments))
    assert torch.equal(ck.load().generate(ids, **arguments), model.generate(ids, **arguments))


@pytest.mark.parametrize("program", ["0-1 4-5", "4 0-3 5", "0-2 5"])
def test_a_layer_whose_keys_nobody_keeps_is_refused(tmp_path: Path, program: str) -> None:
    _, ck = made(tmp_path, "gemma3n_text")
    with pytest.raises(FamilyError, match=r"visit \d of layer [45] reuses .* visit layer [23] first"):
        ck.apply(program).load()


def contacts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.predict_contacts(ids, torch.ones_like(ids))


@pytest.mark.parametrize(
    ("program", "order", "form"),
    [("0-1 4-5", [0, 1, 4, 5], "plain"), ("0 0 1-5", [0, 0, 1, 2, 3, 4, 5], "native")],
)
def test_the_contact_head_reads_the_layers_that_run(tmp_path: Path, program: str, order: list[int], form: str) -> None:
    with quiet():
        model = EsmForMaskedLM(EsmConfig.from_dict(tiny_config("esm").to_dict())).eval()
        model.save_pretrained(tmp_path / "m")
    changed = deepen.open(tmp_path / "m").apply(program)
    assert changed.save(tmp_path / "out").form == form
    # by hand: a model of the new depth, filled layer by layer, and the block of the regression that belongs to each
    by_hand = EsmForMaskedLM(EsmConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": len(order)})).eval()
    state = {name: value for name, value in model.state_dict().items() if ".layer." not in name}
    blocks = state["esm.contact_head.regression.weight"].chunk(6, 1)
    state["esm.contact_head.regression.weight"] = torch.cat([blocks[index] for index in order], 1)
    by_hand.load_state_dict(state, strict=False)
    for new, old in enumerate(order):
        by_hand.esm.encoder.layer[new].load_state_dict(model.esm.encoder.layer[old].state_dict())
    ids = torch.randint(5, 30, (2, 9))
    expected = contacts(by_hand, ids)
    torch.testing.assert_close(contacts(changed.load(), ids), expected)
    torch.testing.assert_close(contacts(deepen.open(tmp_path / "out").load(), ids), expected)
    if form == "plain":
        assert torch.equal(contacts(EsmForMaskedLM.from_pretrained(tmp_path / "out").eval(), ids), expected)


def test_a_native_folder_holds_the_blocks_of_its_bank(tmp_path: Path) -> None:
    model, ck = made(tmp_path, "gemma3n_text")
    inputs = tiny_inputs(model)
    native = ck.apply("0 (2-3)*2 5")
    assert native.save(tmp_path / "native").form == "native"
    held = load_file(tmp_path / "native" / "model.safetensors")[EMBEDDINGS]
    assert held.shape[1] * 6 == load_file(tmp_path / "m" / "model.safetensors")[EMBEDDINGS].shape[1] * 4
    opened = deepen.open(tmp_path / "native")
    assert torch.equal(output_of(opened.load(), inputs), output_of(native.load(), inputs))
