"""The cases of public fault reports, each as it was reported: what other tools get wrong must hold here.

What every family must do (drop, repeat, reorder, cache, reload) is in `test_families.py`; these are particular.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, GPT2LMHeadModel, LlamaForCausalLM

import deepen
import deepen.hf
from deepen.checkpoint.family import known_families
from deepen.checkpoint.load import quiet
from deepen.checkpoint.reference import step_by_step, unrolled
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import FamilyError, SaveError


def made(tmp_path: Path, model_type: str, **changes: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    with quiet():
        model = tiny_checkpoint(tmp_path / model_type, model_type, **changes)
    return model, deepen.open(tmp_path / model_type), tiny_inputs(model)


def close(one: torch.Tensor, two: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return (one - two).abs().max().item() <= tolerance * max(1.0, two.abs().max().item())


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("model_type", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("opt", "num_hidden_layers")]
)
def test_t1_dropped_layers_generate_with_the_cache(tmp_path: Path, model_type: str, key: str) -> None:
    model, checkpoint, inputs = made(tmp_path, model_type)
    short = checkpoint.apply("0-1 4-5").load()
    by_hand = unrolled(model, checkpoint.family.towers[0].container, [0, 1, 4, 5], [key])
    ids = inputs["input_ids"][:1, :5]
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = by_hand.generate(ids, **arguments)
    assert torch.equal(short.generate(ids, **arguments), expected)
    assert torch.equal(short.generate(ids, use_cache=False, **arguments), expected)
    checkpoint.apply("0-1 4-5").save(tmp_path / "out")
    assert config_of(tmp_path / "out")[key] == 4


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "opt", "gemma2"])
def test_t2_shared_repeats_have_a_slot_each(tmp_path: Path, model_type: str) -> None:
    _, checkpoint, inputs = made(tmp_path, model_type)
    looped = checkpoint.apply("0-3 (2-3) 4-5")
    model = looped.load()
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).cache
    assert len(cache.layers) == 8
    assert sum(p.numel() for p in model.parameters()) == checkpoint.cost().params
    assert close(step_by_step(model, inputs, 6), output_of(model, inputs), 1e-4)


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_t2_looped_decoders_generate(tmp_path: Path, model_type: str) -> None:
    model, checkpoint, inputs = made(tmp_path, model_type)
    tower = checkpoint.family.towers[1]
    by_hand = unrolled(model, tower.container, [0, 1, 0, 1, 2], tower.depth_attributes)
    # transformers sizes the cache of T5 by the depth of its encoder.
    setattr(by_hand.config, "num_layers" if model_type == "t5" else tower.depth, 5)
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with quiet():
        expected = by_hand.generate(**given, **arguments)
        assert torch.equal(checkpoint.apply("decoder: (0-1)*2 2").load().generate(**given, **arguments), expected)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_t2_repeats_generate_with_every_cache(tmp_path: Path, implementation: str) -> None:
    model, checkpoint, inputs = made(tmp_path, "llama")
    order = [0, 1, 2, 1, 2, 3, 4, 5]
    by_hand = unrolled(model, "layers", order, ["num_hidden_layers"])
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "cache_implementation": implementation}
    with quiet():
        got = checkpoint.apply("0 (1-2)*2 3-5").load().generate(inputs["input_ids"][:, :5], **arguments)
    del arguments["cache_implementation"]
    assert torch.equal(got, by_hand.generate(inputs["input_ids"][:, :5], **arguments))


def test_t2_beams_and_padding(tmp_path: Path) -> None:
    model, checkpoint, inputs = made(tmp_path, "llama")
    by_hand = unrolled(model, "layers", [0, 1, 1, 2, 3, 4, 5], ["num_hidden_layers"])
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    looped = checkpoint.apply("0 (1)*2 2-5").load()
    ids = inputs["input_ids"][:, :6]
    assert torch.equal(looped.generate(ids, **arguments), by_hand.generate(ids, **arguments))


def test_t2_a_cache_made_by_the_user(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "llama")
    for text in ("0 (1-2)*2 3-5", "0.f 1 2.f 3", "0 (1)*2[kv=first] 2"):
        model = checkpoint.apply(text).load()
        ids = inputs["input_ids"]
        cache = DynamicCache()
        pieces = (ids[:, :7], *ids[:, 7:].split(1, 1))
        with torch.no_grad():
            pieces = [model(piece, cache=cache, use_cache=True).logits for piece in pieces]
        assert close(torch.cat(pieces, 1), output_of(model, inputs), 1e-4), text


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen2"])
def test_t3_types_follow_the_layers(tmp_path: Path, model_type: str) -> None:
    _, checkpoint, _ = made(tmp_path, model_type)
    types = checkpoint.config["layer_types"]
    checkpoint.apply("0 3-5").save(tmp_path / "out")
    assert config_of(tmp_path / "out")["layer_types"] == [types[0], *types[3:]]


def test_t3_types_that_the_file_leaves_out_are_written(tmp_path: Path) -> None:
    """An old config states a pattern only; after a drop the pattern would be another one."""
    _, checkpoint, inputs = made(tmp_path, "gemma2")
    expected = output_of(checkpoint.apply("1-5").load(), inputs)
    config = config_of(tmp_path / "gemma2")
    del config["layer_types"]
    (tmp_path / "gemma2/config.json").write_text(json.dumps(config))
    checkpoint = deepen.open(tmp_path / "gemma2")
    checkpoint.apply("1-5").save(tmp_path / "out")
    assert config_of(tmp_path / "out")["layer_types"][0] == "full_attention"
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert close(output_of(plain, inputs), expected)


def test_t4_files_without_the_prefix_of_the_head(tmp_path: Path) -> None:
    """GPT-2 as it lies on the hub: `h.0...`, not `transformer.h.0...`."""
    model, _, inputs = made(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "gpt2/model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "gpt2/model.safetensors", metadata={"format": "pt"})
    checkpoint = deepen.open(tmp_path / "gpt2")
    assert torch.equal(output_of(checkpoint.load(), inputs), output_of(model, inputs))
    checkpoint.apply("0 2-5").save(tmp_path / "out")
    assert all(name.startswith(("h.", "w", "ln_f")) for name in load_file(tmp_path / "out/model.safetensors"))
    with quiet():
        plain, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert close(output_of(plain, inputs), output_of(checkpoint.apply("0 2-5").load(), inputs))


def test_t5_the_bias_moves_and_only_layer_numbers_change(tmp_path: Path) -> None:
    _, checkpoint, _ = made(tmp_path, "t5")
    told = checkpoint.apply("encoder: 1-3").save(tmp_path / "out")
    names = load_file(tmp_path / "out/model.safetensors").keys()
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert told.form == "plain"
    assert bias in told.kept
    assert sum("relative_attention_bias" in name for name in names) == 2
    matrix = "layer.1.DenseReluDense.wi.weight"
    assert told.renamed[f"encoder.block.0.{matrix}"] == f"encoder.block.1.{matrix}"
    assert config_of(tmp_path / "out")["num_layers"] == 3
    assert config_of(tmp_path / "out")["num_decoder_layers"] == 3


def test_t5_a_loop_that_may_be_skipped_cannot_hold_the_bias(tmp_path: Path) -> None:
    _, checkpoint, _ = made(tmp_path, "t5")
    model = checkpoint.apply("encoder: (0)*0..2 1-3").load()
    with pytest.raises(FamilyError, match="relative_attention_bias"):
        model.deepen.set_counts(0, "encoder")


@pytest.mark.parametrize(
    ("model_type", "program", "field", "value"),
    [
        ("qwen2_moe", "0 2-5", "mlp_only_layers", [1]),
        ("qwen3_moe", "2-5", "mlp_only_layers", [0]),
        ("deepseek_v3", "1-5", "first_k_dense_replace", 0),
        ("deepseek_v3", "0 0! 1-5", "first_k_dense_replace", 2),
    ],
)
def test_t6_dense_layers_stay_dense(tmp_path: Path, model_type: str, program: str, field: str, value: object) -> None:
    _, checkpoint, inputs = made(tmp_path, model_type)
    changed = checkpoint.apply(program)
    assert changed.save(tmp_path / "out").form == "plain"
    assert config_of(tmp_path / "out")[field] == value
    with quiet():
        plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert close(output_of(plain, inputs), output_of(changed.load(), inputs))


def test_t6_what_the_config_cannot_state_is_native_or_refused(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "deepseek_v3")
    changed = checkpoint.apply("1 0 2-5")
    told = changed.save(tmp_path / "out")
    assert told.form == "native"
    assert any("first_k_dense_replace" in note for note in told.notes)
    assert torch.equal(output_of(deepen.open(tmp_path / "out").load(), inputs), output_of(changed.load(), inputs))
    with pytest.raises(FamilyError, match="first_k_dense_replace"):
        changed.save(tmp_path / "baked", bake=True)


def test_t6_expert_numbers_are_not_layer_numbers(tmp_path: Path) -> None:
    _, checkpoint, _ = made(tmp_path, "mixtral")
    told = checkpoint.apply("0 2-5").changes()
    for new, old in told.renamed.items():
        assert new.split(".")[3:] == old.split(".")[3:]
        assert int(old.split(".")[2]) == int(new.split(".")[2]) + 1


def test_t7_scale_by_layer_number_is_folded(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    changed = checkpoint.apply("0 2-5")
    told = changed.save(tmp_path / "out")
    assert told.form == "plain"
    with quiet():
        plain = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert close(output_of(plain, inputs), output_of(changed.load(), inputs))
    # Without the fold the function changes by far more than rounding.
    config = {**config_of(tmp_path / "out"), "scale_attn_by_inverse_layer_idx": True}
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with quiet():
        scaled_twice = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert not close(output_of(scaled_twice, inputs), output_of(changed.load(), inputs), 1e-2)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon", "mixtral", "t5", "whisper"])
def test_t7_growth_leaves_the_function(tmp_path: Path, model_type: str) -> None:
    model, checkpoint, inputs = made(tmp_path, model_type)
    tower = checkpoint.family.towers[-1].name
    grown = checkpoint.apply(f"{tower}: 0 0!zero 1 1!zero 2-{checkpoint.depth[tower] - 1}")
    assert grown.save(tmp_path / "out").form == "plain"
    with quiet():
        plain = type(model).from_pretrained(tmp_path / "out")
    assert close(output_of(plain, inputs), output_of(model, inputs))


def test_t10_ties_are_kept(tmp_path: Path) -> None:
    _, checkpoint, _ = made(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in checkpoint.source.infos
    checkpoint.apply("0 (1)*2 2-5").save(tmp_path / "native")
    checkpoint.apply("0 (1)*2 2-5").save(tmp_path / "baked", bake=True)
    for folder in ("native", "baked"):
        assert "lm_head.weight" not in load_file(tmp_path / folder / "model.safetensors")
    with quiet():
        baked = LlamaForCausalLM.from_pretrained(tmp_path / "baked")
    assert baked.lm_head.weight is baked.model.embed_tokens.weight


def test_t10_native_shares_and_baked_equals_it(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "llama")
    looped = checkpoint.apply("0 (1-2)*3 3-5")
    native = looped.save(tmp_path / "native")
    baked = looped.save(tmp_path / "baked", bake=True)
    assert native.parameters == checkpoint.cost().params < baked.parameters
    with quiet():
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "baked")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
        again.save_pretrained(tmp_path / "written back")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "written back")
    expected = output_of(looped.load(), inputs)
    assert torch.equal(output_of(plain, inputs), expected)
    assert torch.equal(output_of(again, inputs), expected)
    assert torch.equal(output_of(back, inputs), expected)


def test_native_form_fails_loudly_without_deepen(tmp_path: Path) -> None:
    """A program that does not know deepen must not load another model."""
    import subprocess
    import sys

    _, checkpoint, _ = made(tmp_path, "llama")
    checkpoint.apply("0 (1)*2 2-5").save(tmp_path / "native")
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path / 'native')!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "deepen_checkpoint" in result.stderr


def test_saving_the_loaded_model_writes_the_plain_form_when_it_can(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "gemma2")
    model = checkpoint.apply("1-4").load()
    with quiet():
        model.save_pretrained(tmp_path / "out")
        plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert config_of(tmp_path / "out")["model_type"] == "gemma2"
    assert not info["missing_keys"]
    assert torch.equal(output_of(plain, inputs), output_of(model, inputs))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("program", ["0 (1-2)*2 3-5", "0 2-5"])
def test_t10_peft_trains_saves_and_merges_on_a_program(tmp_path: Path, program: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    _, checkpoint, inputs = made(tmp_path, "llama")
    base = checkpoint.apply(program)
    model = get_peft_model(base.load(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))
    adapted = output_of(model, inputs)
    assert not close(adapted, output_of(base.load(), inputs), 1e-3)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(base.load(), tmp_path / "adapter")
    assert torch.equal(output_of(again, inputs), adapted)
    assert close(output_of(again.merge_and_unload(), inputs), adapted, 1e-4)


def test_t11_recurrent_state_is_per_visit(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "mamba")
    model = checkpoint.apply("0 (1-2)*2 3-5").load()
    assert close(step_by_step(model, inputs, 6), output_of(model, inputs), 1e-4)
    aliased = _alias_slots(model)
    assert not close(step_by_step(aliased, inputs, 6), output_of(model, inputs), 1e-2)


def test_slots_of_one_layer_must_not_meet(tmp_path: Path) -> None:
    """The classic fault, planted: with the layer's own number as the slot, cached and uncached differ."""
    _, checkpoint, inputs = made(tmp_path, "llama")
    model = checkpoint.apply("0 (1-2)*2 3-5").load()
    expected = output_of(model, inputs)
    assert not close(step_by_step(_alias_slots(model), inputs, 6), expected, 1e-2)


def _alias_slots(model: Any) -> Any:
    for module in model.modules():
        for entry in getattr(module, "entries", ()):
            entry.slot = int(entry.child)
    return model


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_t11_packed_layers_are_copied_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """A layer is an opaque set of tensors of any dtype."""
    _, _, _ = made(tmp_path, "llama")
    path = tmp_path / "llama/model.safetensors"
    tensors = load_file(path)
    packed = {}
    for name, tensor in tensors.items():
        if ".mlp." in name:
            packed[name] = torch.randint(0, 100, tensor.shape, dtype=dtype)
            packed[name.replace(".weight", ".weight_scale")] = torch.rand(tensor.shape[0])
        else:
            packed[name] = tensor
    save_file(packed, path, metadata={"format": "pt"})
    told = deepen.open(tmp_path / "llama").apply("0 3-5").save(tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    for new, old in {**told.renamed, **{name: name for name in told.kept}}.items():
        assert torch.equal(written[new], packed[old])
    assert any(name.endswith("weight_scale") for name in written)
    with pytest.raises((SaveError, deepen.errors.CheckpointError)):
        deepen.open(tmp_path / "llama").apply("0 (1.f)[scale=1/2] 2").save(tmp_path / "scaled", bake=True)


def test_whisper_alignment_heads_follow_the_decoder(tmp_path: Path) -> None:
    _, checkpoint, _ = made(tmp_path, "whisper")
    path = tmp_path / "whisper/generation_config.json"
    settings = {**json.loads(path.read_text()), "alignment_heads": [[0, 1], [2, 3], [2, 0]]}
    path.write_text(json.dumps(settings))
    checkpoint.apply("decoder: 1-2").save(tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["alignment_heads"] == [[1, 3], [1, 0]]


def test_towers_by_name(tmp_path: Path) -> None:
    model, checkpoint, inputs = made(tmp_path, "bart")
    changed = checkpoint.apply("encoder: 0-1 3 decoder: 0 2")
    expected = output_of(_both(model, [0, 1, 3], [0, 2]), inputs)
    assert close(output_of(changed.load(), inputs), expected)
    told = changed.save(tmp_path / "out")
    assert told.layers == {"encoder": (0, 1, 3), "decoder": (0, 2)}


def _both(model: Any, encoder: Sequence[int], decoder: Sequence[int]) -> Any:
    half = unrolled(model, "encoder.layers", encoder, ["encoder_layers"])
    return unrolled(half, "decoder.layers", decoder, ["decoder_layers"])


def test_early_exit_of_assisted_generation_leaves_the_config(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "llama")
    model = checkpoint.apply("0 (1-2)*2 3-5").load()
    before = model.config.num_hidden_layers
    with quiet():
        model.generate(inputs["input_ids"][:1, :5], max_new_tokens=4, do_sample=False)
    assert model.config.num_hidden_layers == before == 8


def _picture_model(folder: Path, model_type: str, **vision: object) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    known = known_families()[model_type].tiny
    return made(folder, model_type, vision_config={**known["vision_config"], **vision})


def test_deepstack_taps_follow_their_layers_and_keep_their_mergers(tmp_path: Path) -> None:
    model, checkpoint, inputs = _picture_model(tmp_path, "qwen3_vl", deepstack_visual_indexes=[1, 2])
    changed = checkpoint.apply("vision: 3 1 0 1 2")
    expected = unrolled(model, "visual.blocks", [3, 1, 0, 1, 2], ["depth"])
    expected.model.visual.deepstack_visual_indexes = [3, 4]
    assert close(output_of(changed.load(), inputs), output_of(expected, inputs))
    first = unrolled(model, "visual.blocks", [3, 1, 0, 1, 2], ["depth"])
    first.model.visual.deepstack_visual_indexes = [1, 4]
    assert not close(output_of(first, inputs), output_of(expected, inputs), 1e-3)
    assert checkpoint.apply("vision: 1-3").save(tmp_path / "out").form == "plain"
    assert config_of(tmp_path / "out")["vision_config"]["deepstack_visual_indexes"] == [0, 1]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("vision: 0 2-3", "after layer 1, which the program does not execute"),
        ("vision: 0 {1|3} 2", "layer 1, whose last visit is inside a group"),
        ("text: 5", "has 2 entries"),
        ("text: 0 1.a 1.f 2-5", r"visit 1 \(1\) is a part"),
        ("text: 0 {1|2} 3-5", r"visit 1 \(1\) is a part, a zero copy, or inside a group"),
        ("text: (0)*0..1 1-5", "a loop of variable length"),
        ("text: 0 0!zero 1-5", "a zero copy"),
    ],
)
def test_deepstack_is_refused_where_it_has_no_place(tmp_path: Path, program: str, reason: str) -> None:
    _, checkpoint, _ = _picture_model(tmp_path, "qwen3_vl", deepstack_visual_indexes=[1, 2])
    changed = checkpoint.apply(program)
    with pytest.raises(FamilyError, match=reason):
        changed.load()
    with pytest.raises(FamilyError, match=reason):
        changed.save(tmp_path / "out")


def test_deepstack_joins_before_a_group_that_follows(tmp_path: Path) -> None:
    _, checkpoint, inputs = _picture_model(tmp_path, "qwen3_vl", deepstack_visual_indexes=[1, 2])
    grouped = output_of(checkpoint.apply("text: 0 1 {2|_} 3-5").load(dtype="float64"), _in_double(inputs))
    assert close(grouped, output_of(checkpoint.apply("text: 0-5").load(dtype="float64"), _in_double(inputs)))


def _in_double(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def test_llava_reads_a_list_of_layers(tmp_path: Path) -> None:
    model, checkpoint, inputs = made(tmp_path, "vipllava", vision_feature_layer=[-2, 1, 4])
    changed = checkpoint.apply("vision: 0 2 3 2 0")
    expected = unrolled(model, "vision_tower.encoder.layers", [0, 2, 3, 2, 0], ["num_hidden_layers"])
    expected.config.vision_feature_layer = [4, 5, 3]
    assert close(output_of(changed.load(), inputs), output_of(expected, inputs))
    checkpoint.apply("vision: 0 2-3").save(tmp_path / "out")
    assert config_of(tmp_path / "out")["vision_feature_layer"] == [-2, 1, 3]
    with pytest.raises(FamilyError, match="vision_feature_layer = 1 reads the stream after layer 0"):
        checkpoint.apply("vision: 1-3").save(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_mllama_layers_that_cross_keep_their_class_and_their_cache(tmp_path: Path) -> None:
    _, checkpoint, inputs = made(tmp_path, "mllama")
    changed = checkpoint.apply("text: 0 (3 4)*2 5 vision: 1-3 global: 0 2")
    model = changed.load()
    assert close(step_by_step(model, inputs, 5), output_of(model, inputs), 1e-4)
    changed.save(tmp_path / "out", bake=True)
    config = config_of(tmp_path / "out")
    assert config["text_config"]["cross_attention_layers"] == [1, 3]
    assert config["vision_config"]["intermediate_layers_indices"] == [1, 2]
    assert config["vision_config"]["num_global_layers"] == 2
    for program, reason in (("3 0", "may come first"), ("0 (1)*2[kv=first] 3", "by the number of the visit")):
        with pytest.raises(FamilyError, match=reason):
            checkpoint.apply(f"text: {program}").load()
