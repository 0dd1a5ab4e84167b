"""Fused feed-forwards: the group of them, in one layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs
from deepen.errors import CheckpointError, FamilyError, ProgramError, UsageError
from tests.assets import smollm2_gguf
from tests.surgery.cases import checkpoint, layer, off, outputs, silence

# Gated and plain, gains that are multiplied as they are and as 1 + g, norms with and without a bias or a gain.
FAMILIES = ("llama", "gemma", "gpt2", "starcoder2", "olmo", "qwen3", "granite", "gpt_bigcode")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("fuse") / "llama", "llama")


@pytest.mark.method("fuse")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_layer_is_the_group(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    fused, told = deepen.fuse(ck, 2, 4, measure=True)
    assert told.same_as == "0-1 {2.f|3.f|4.f} 5"
    assert (told.after, told.dropped) == ("0-1 6.f 5", (2, 3, 4))
    group = outputs(ck.apply("0-1 {2.f|3.f|4.f} 5"))
    assert off(outputs(fused), group) < 1e-5
    assert told.max_logit_difference is not None
    assert told.max_logit_difference < 1e-5 * max(1.0, group.abs().max().item())
    assert off(outputs(ck.apply("0-1 2.f 3.f 4.f 5")), group) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_first_mixer_may_stay(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    fused, told = deepen.fuse(ck, 2, 3, mixer=True)
    assert off(outputs(fused), outputs(ck.apply("0-1 2.a {2.f|3.f} 4-5"))) < 1e-5
    assert told.after == "0-1 6 4-5"
    assert deepen.fuse(ck.apply("0-2 3.f 4-5"), 2, 3, mixer=True)[1].before == "0-2 3.f 4-5"
    model = fused.load()
    inputs = tiny_inputs(model, tokens=16)
    assert off(step_by_step(model, inputs, 4), output_of(model, inputs)) < 1e-5


def test_gains_that_differ_need_the_fold(llama: Checkpoint) -> None:
    fused, told = deepen.fuse(llama, 2, 3)
    infos = fused.disk["text"].layers[6]
    norm = fused.source.read(infos["post_attention_layernorm.weight"])
    assert torch.equal(norm, torch.ones_like(norm))
    up = fused.source.read(infos["mlp.up_proj.weight"])
    raw = torch.cat([llama.source.read(f"model.layers.{index}.mlp.up_proj.weight") for index in (2, 3)])
    assert up.shape == raw.shape == (96, 32)
    assert off(up, raw) > 1e-2
    assert len(told.folded) == 4


def test_silent_feed_forwards_fuse_into_the_sequence(tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        for index in (3, 4):
            silence(layer(model, index), "mlp.down_proj")

    ck = checkpoint(tmp_path / "llama", "llama", plant)
    fused, _ = deepen.fuse(ck, 2, 4)
    assert off(outputs(fused), outputs(ck.apply("0-1 2.f 5"))) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_is_saved_in_the_native_form_and_costs_what_it_holds(family: str, dtype: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family, dtype=dtype)
    fused, _ = deepen.fuse(ck, 2, 3, mixer=True)
    told = fused.save(tmp_path / "fused")
    assert told.form == "native"
    again = deepen.open(tmp_path / "fused")
    assert again.widths == {"text": {2: fused.widths["text"][6]}}
    assert torch.equal(outputs(again), outputs(fused))
    model = again.load()
    assert again.cost().params == fused.cost().params == sum(each.numel() for each in model.parameters())
    group = ck.apply("0-1 2.a {2.f|3.f} 4-5").cost()
    assert fused.cost().flops == pytest.approx(group.flops)
    assert fused.cost().params < group.params
    assert fused.cost().path < ck.apply("0-2 3.f 4-5").cost().path
    model.save_pretrained(tmp_path / "written")
    assert torch.equal(outputs(deepen.open(tmp_path / "written")), outputs(fused))
    twice, _ = deepen.fuse(again.apply(again.program), 2, 3)
    assert twice.widths["text"][5] == 3 * fused.widths["text"][6] // 2
    assert off(outputs(twice), outputs(again.apply("0-1 {2.f|3.f} 4"))) < (1e-5 if dtype == "float32" else 0.1)


def test_the_auto_class_loads_it(llama: Checkpoint, tmp_path: Path) -> None:
    import deepen.hf

    fused, _ = deepen.fuse(llama, 2, 3)
    fused.save(tmp_path / "fused")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert torch.equal(output_of(model, tiny_inputs(model, tokens=16)), outputs(fused))


def test_the_plain_format_is_refused_with_both_widths(llama: Checkpoint, tmp_path: Path) -> None:
    fused, _ = deepen.fuse(llama, 2, 3)
    with pytest.raises(
        FamilyError, match="fused feed-forward of width 96, and a plain llama config states one width, 48"
    ):
        fused.save(tmp_path / "baked", bake=True)
    assert not (tmp_path / "baked").exists()
    assert fused.apply("0-5").save(tmp_path / "plain").form == "plain"


@pytest.mark.parametrize("widths", [{"text": {"9": 96}}, {"text": {"2": 0}}, {"vision": {"2": 96}}, [], {"text": 4}])
def test_widths_that_fit_no_layer_are_refused(llama: Checkpoint, widths: object, tmp_path: Path) -> None:
    deepen.fuse(llama, 2, 3)[0].save(tmp_path / "fused")
    path = tmp_path / "fused" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "widths": widths}))
    with pytest.raises(CheckpointError, match="widths must give layers of a tower"):
        deepen.open(tmp_path / "fused")


def test_a_width_that_the_files_do_not_have_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    deepen.fuse(llama, 2, 3)[0].save(tmp_path / "fused")
    path = tmp_path / "fused" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "widths": {"text": {"2": 95}}}))
    with pytest.raises(CheckpointError, match=r"has the shape \[.*96.*\], but config.json describes"):
        deepen.open(tmp_path / "fused").load()


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.fuse(ck, 4, 6), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.fuse(ck, 2, 2), UsageError, "at least two"),
        (
            lambda ck: deepen.fuse(ck.apply("0-2 3.a 4-5"), 2, 3),
            UsageError,
            "layer 3 is visited without its feed-forward",
        ),
        (lambda ck: deepen.fuse(ck.apply("0-1 2.f 3-5"), 2, 3, mixer=True), UsageError, "layer 2 .* without its mixer"),
        (lambda ck: deepen.fuse(ck.apply("0 {1|2} 3-5"), 2, 3), ProgramError, "layer 2 is visited nowhere outside"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "post_feedforward_layernorm stands behind it"),
        ("codegen", "its mixer and feed-forward share their input"),
        ("qwen3_moe", "writes with .* tensors"),
        ("bert", "cannot be fused: it normalises after the addition"),
        ("opt", "cannot be fused: its layer has no feed-forward module"),
        ("mamba", "cannot be fused: it has no feed-forward part of its own"),
        ("nemotron", "post_attention_layernorm of layer 3 has a bias and mlp.up_proj has none to fold it into"),
        ("phi3", "it has 0 input matrices"),
    ],
)
def test_feed_forwards_that_cannot_be_fused_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=reason):
        deepen.fuse(checkpoint(tmp_path / family, family), 3, 4)


@pytest.mark.slow
def test_smollm2_within_its_own_rounding() -> None:
    ck = deepen.open(smollm2_gguf())
    fused, _ = deepen.fuse(ck, 12, 13)
    inputs = {"input_ids": ck.tokenizer()("The capital of France is Paris. The capital", return_tensors="pt").input_ids}
    group = ck.apply("0-11 {12.f|13.f} 14-29")
    eager, sdpa = (output_of(group.load(attn_implementation=kind), inputs) for kind in ("eager", "sdpa"))
    assert (output_of(fused.load(), inputs) - sdpa).abs().max() <= 4 * (eager - sdpa).abs().max()
