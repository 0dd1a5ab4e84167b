"""LoRA adapters and quantisation lists: what names layers beside the weights follows the layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import deepen
from deepen.checkpoint.layer_names import layer_names
from deepen.checkpoint.layout import NewLayer
from deepen.checkpoint.load import quiet
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import CheckpointError, FamilyError, SaveError

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def adapted(tmp_path: Path, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny llama in `m`, a random adapter for it in `a`, and the two together."""
    with quiet():
        model = tiny_checkpoint(tmp_path / "m", "llama")
        inputs = tiny_inputs(model)
        options = {"target_modules": ["q_proj", "down_proj"], "r": 2, "init_lora_weights": False, **config}
        both = get_peft_model(model, LoraConfig(**options))
        both.save_pretrained(tmp_path / "a")
    return both.eval(), inputs


def merged_by_hand(both: Any, order: list[int]) -> Any:
    """Merged into the weights first, the layers picked afterwards."""
    model = both.merge_and_unload()
    model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in order)
    model.config.num_hidden_layers = len(order)
    return model


@pytest.mark.parametrize(
    ("program", "order", "form"),
    [
        ("0-5", [0, 1, 2, 3, 4, 5], "plain"),
        ("5 0 2-4", [5, 0, 2, 3, 4], "plain"),
        ("0 (1-2)*2 5", [0, 1, 2, 1, 2, 5], "native"),
    ],
)
def test_an_adapter_follows_its_layers(tmp_path: Path, program: str, order: list[int], form: str) -> None:
    both, inputs = adapted(
        tmp_path, rank_pattern={"model.layers.1.self_attn.q_proj": 3}, alpha_pattern={"layers.5.mlp.down_proj": 7}
    )
    ck = deepen.open(tmp_path / "m", adapter=tmp_path / "a").apply(program)
    changes = ck.save(tmp_path / "out")
    assert changes.form == form
    assert any("adapter" in note for note in changes.notes)
    running = output_of(ck.load(), inputs)
    expected = output_of(merged_by_hand(both, order), {**inputs, "use_cache": False})
    torch.testing.assert_close(running, expected, rtol=1e-4, atol=1e-4)
    # the folder alone knows its adapter, and so does PEFT
    torch.testing.assert_close(output_of(deepen.open(tmp_path / "out").load(), inputs), running)
    if form == "plain":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(
            output_of(PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval(), inputs), running
        )


def test_a_bake_gives_each_copy_its_adapter(tmp_path: Path) -> None:
    _, inputs = adapted(tmp_path, layers_to_transform=[1, 4])
    ck = deepen.open(tmp_path / "m", adapter=tmp_path / "a").apply("0 (1-2)*2 4")
    ck.save(tmp_path / "out", bake=True, verify=True)
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1, 3, 5]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(
        output_of(PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval(), inputs),
        output_of(ck.load(), inputs),
    )


def test_an_adapter_that_cannot_follow_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path)
    ck = deepen.open(tmp_path / "m", adapter=tmp_path / "a")
    with pytest.raises(SaveError, match=r"mlp.down_proj zeroed or scaled.*merge the adapter"):
        ck.apply("0 1.a 2").save(tmp_path / "out", bake=True)
    path = tmp_path / "a/adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_modules": r".*layers\.[0-3]\..*q_proj"}))
    with pytest.raises(FamilyError, match="names layers by number"):
        ck.apply("0 2-5").save(tmp_path / "out")
    path.write_text(json.dumps({**config, "layer_replication": [[0, 4]]}))
    with pytest.raises(CheckpointError, match="layer_replication"):
        ck.load()
    path.write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match="IA3"):
        ck.load()
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json there"):
        deepen.open(tmp_path / "m", adapter=tmp_path / "m")
    assert not (tmp_path / "out").exists()


def test_ignore_lists_follow_their_layers(tmp_path: Path) -> None:
    with quiet():
        tiny_checkpoint(tmp_path / "m", "llama")
    path = tmp_path / "m/config.json"
    listed = ["lm_head", "model.layers.0.mlp", "model.layers.3.self_attn.q_proj", "re:.*norm.*"]
    dynamic = {"model.layers.3.mlp": {"bits": 8}, "lm_head": {"bits": 16}}
    quantised = {"quant_method": "awq", "modules_to_not_convert": listed, "dynamic": dynamic}
    config = {**json.loads(path.read_text()), "quantization_config": quantised}
    path.write_text(json.dumps(config))
    changes = deepen.open(tmp_path / "m").apply("3 1 3!").changes()
    assert changes.form == "plain"
    _, after = changes.config["quantization_config"]
    assert after["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.self_attn.q_proj",
        "re:.*norm.*",
    ]
    assert after["dynamic"] == {
        "model.layers.0.mlp": {"bits": 8},
        "model.layers.2.mlp": {"bits": 8},
        "lm_head": {"bits": 16},
    }
    quantised["modules_to_not_convert"] = [r"re:.*layers\.3\..*"]
    path.write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="names layers by number"):
        deepen.open(tmp_path / "m").apply("0 3").save(tmp_path / "out", bake=True)
    assert deepen.open(tmp_path / "m").changes().config == {}


def test_an_expert_keeps_its_number(tmp_path: Path) -> None:
    with quiet():
        tiny_checkpoint(tmp_path / "m", "mixtral")
    names = layer_names(deepen.open(tmp_path / "m"), {"text": [NewLayer(4), NewLayer(1)]})
    assert names.renamed("model.layers.4.mlp.experts.1.up_proj") == ["model.layers.0.mlp.experts.1.up_proj"]
    assert names.renamed("layers.2.mlp.experts.1") == []
    assert names.renamed("model.embed_tokens") == ["model.embed_tokens"]


def test_a_packed_model_runs_with_its_ignore_list(tmp_path: Path) -> None:
    """Weights in eight bits with a scale a block, all but layer 3, which is listed: the list must follow the layer."""
    with quiet():
        tiny_checkpoint(tmp_path / "m", "llama")
    folder = tmp_path / "m"
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name and ".layers.3." not in name]:
        weight = tensors[name]
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = torch.full([-(-size // 16) for size in weight.shape], 2.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head", "model.layers.3"],
        "dequantize": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tiny_inputs(original)
    ck = deepen.open(folder)
    assert torch.equal(output_of(ck.load(), inputs), output_of(original, inputs))
    short = ck.apply("0 3 5")
    short.save(tmp_path / "out")
    assert (
        load_file(tmp_path / "out/model.safetensors")["model.layers.2.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    )
    original.model.layers = torch.nn.ModuleList(original.model.layers[index] for index in (0, 3, 5))
    expected = output_of(original, {**inputs, "use_cache": False})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(output_of(plain, {**inputs, "use_cache": False}), expected)
    assert torch.equal(output_of(short.load(), {**inputs, "use_cache": False}), expected)
