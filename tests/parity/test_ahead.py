"""DeepSeek-V3 and its kin store layers behind the last one that predict further tokens; transformers runs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import deepen
from deepen.checkpoint.load import quiet
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with quiet():
        tiny_checkpoint(tmp_path / "m", "deepseek_v3", num_nextn_predict_layers=1)
    path = tmp_path / "m/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.6.eh_proj.weight"] = torch.randn(32, 64)
    tensors["model.layers.6.input_layernorm.weight"] = torch.ones(32)
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path / "m"


def test_the_model_opens_runs_and_keeps_them_while_it_is_whole(folder: Path, tmp_path: Path) -> None:
    ck = deepen.open(folder)
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tiny_inputs(original)
    assert ck.depth == {"text": 6}
    assert torch.equal(output_of(ck.load(), inputs), output_of(original, inputs))
    assert ck.cost().params == sum(parameter.numel() for parameter in original.parameters())
    ck.save(tmp_path / "same")
    assert load_file(tmp_path / "same/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize(("program", "form"), [("0-3 5", "plain"), ("0 (1-2)*2 3-5", "native")])
def test_they_are_left_out_of_another_depth_and_that_is_said(
    folder: Path, tmp_path: Path, program: str, form: str
) -> None:
    changed = deepen.open(folder).apply(program)
    told = changed.save(tmp_path / "out", verify=True)
    assert told.form == form
    names = load_file(tmp_path / "out/model.safetensors")
    assert not any("eh_proj" in name for name in names)
    config = json.loads((tmp_path / "out/config.json").read_text())
    if form == "plain":
        assert config["num_nextn_predict_layers"] == 0
        assert any("predict further tokens" in note for note in told.notes)


def test_one_more_than_the_config_says_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match="also hold layer 6"):
        deepen.open(folder).load()
