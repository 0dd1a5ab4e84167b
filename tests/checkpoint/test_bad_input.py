"""Bad input: one clear error that says where, what was expected and what came; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepen
from deepen.checkpoint.tiny import tiny_checkpoint
from deepen.errors import CheckpointError, FamilyError, ProgramError, SaveError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model", "llama")
    return tmp_path / "model"


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        deepen.open(tmp_path / "nowhere")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        deepen.open(folder)


def test_unknown_family_is_refused_with_the_nearest(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(model_type="lama"))
    with pytest.raises(FamilyError, match=r"does not know the family 'lama'.*did you mean 'llama'"):
        deepen.open(folder)


def test_remote_code_is_never_run(folder: Path) -> None:
    (folder / "modeling_x.py").write_text("raise SystemExit('ran')")
    edit_config(folder, lambda config: config.update(model_type="x", auto_map={"AutoModel": "modeling_x.X"}))
    with pytest.raises(FamilyError):
        deepen.open(folder)


def test_fields_of_a_newer_transformers_are_named(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(transformers_version="99.0.0"))
    deepen.open(folder)  # newer, but with nothing that would be ignored
    edit_config(folder, lambda config: config.update(layer_dance="tango"))
    with pytest.raises(FamilyError, match=r"written by transformers 99\.0\.0.*layer_dance.*install 99\.0\.0 or newer"):
        deepen.open(folder)
    edit_config(folder, lambda config: config.update(transformers_version="5.1.0"))
    deepen.open(folder)


def test_missing_depth_key(folder: Path) -> None:
    edit_config(folder, lambda config: config.pop("num_hidden_layers"))
    with pytest.raises(CheckpointError, match=r"does not say how many layers.*num_hidden_layers"):
        deepen.open(folder)


@pytest.mark.parametrize("depth", [0, -1, "6", None, True, 2.5])
def test_nonsense_depth(folder: Path, depth: object) -> None:
    edit_config(folder, lambda config: config.update(num_hidden_layers=depth))
    with pytest.raises(CheckpointError, match=r"expected a positive integer|refuses config.json"):
        deepen.open(folder)


def test_config_promises_more_layers_than_the_files_hold(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(num_hidden_layers=7))
    with pytest.raises(CheckpointError, match=r"says 7 layers.*no tensor of layer 6"):
        deepen.open(folder).load()


def test_files_hold_more_layers_than_the_config_says(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(num_hidden_layers=5))
    with pytest.raises(CheckpointError, match=r"says 5 layers.*also hold layer 5"):
        deepen.open(folder).load()


def test_shape_contradicts_config(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(intermediate_size=40))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has the shape"):
        deepen.open(folder).load()


def test_one_tensor_of_a_layer_is_missing(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.up_proj\.weight is missing"):
        deepen.open(folder).load()


def test_tensor_nobody_uses(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.3.extra": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="does not use"):
        deepen.open(folder).load()


def test_untested_transformers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepen.checkpoint.open.transformers.__version__", "6.0.0")
    with pytest.raises(CheckpointError, match="outside the tested range"):
        deepen.open(folder)


@pytest.mark.parametrize(
    ("program", "column", "reason"),
    [
        ("12", 1, "layer 12 does not exist"),
        ("0-14", 3, "layer 14 does not exist"),
        ("0-", 3, ""),
        ("(0 1", 5, ""),
        ("3!4", 3, "separator needed"),
        ("{0|1", 5, ""),
        ("0 4-5*", 7, ""),
        ("0-3)", 4, ""),
    ],
)
def test_malformed_program_points_at_the_column(folder: Path, program: str, column: int, reason: str) -> None:
    with pytest.raises(ProgramError) as caught:
        deepen.open(folder).apply(program)
    assert caught.value.column == column
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "program", ["0 (1)[p=0.1] 2", "0 (1-2)*2[res=1/2]", "0 (1)*2[kv=last]", "0 {1|2}[comb=gate]", "0 1!rand"]
)
def test_attributes_of_later_work_are_refused_by_name(folder: Path, program: str) -> None:
    changed = deepen.open(folder).apply(program)
    with pytest.raises(ProgramError, match="not executed on checkpoints yet"):
        changed.load()
    with pytest.raises(ProgramError, match="not executed on checkpoints yet"):
        changed.changes()


def test_tower_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(FamilyError, match=r"no tower 'encoder'.*text"):
        deepen.open(folder).apply("encoder: 0-3")


def test_unnamed_program_of_two_towers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "t5", "t5")
    with pytest.raises(FamilyError, match="several towers"):
        deepen.open(tmp_path / "t5").apply("0-1")


@pytest.mark.parametrize("program", ["0 {1|2} 3-5", "0 (1)[scale=1/2] 2-5", "0 (1)*2[kv=first] 2-5"])
def test_bake_refuses_what_a_plain_checkpoint_cannot_say(folder: Path, tmp_path: Path, program: str) -> None:
    with pytest.raises(SaveError, match=r"bake: .*visit"):
        deepen.open(folder).apply(program).save(tmp_path / "out", bake=True)
    assert not (tmp_path / "out").exists()


def test_output_exists_or_is_the_input(folder: Path, tmp_path: Path) -> None:
    checkpoint = deepen.open(folder)
    before = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there", folder, folder / "inside"):
        with pytest.raises(SaveError):
            checkpoint.save(target)
    assert sorted((path.name, path.stat().st_size) for path in folder.iterdir()) == before


def test_verify_finds_nan(folder: Path, tmp_path: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(SaveError, match="NaN or Inf"):
        deepen.open(folder).save(tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()


def test_verify_reports_the_difference(folder: Path, tmp_path: Path) -> None:
    assert deepen.open(folder).apply("0-2 4-5").save(tmp_path / "out", verify=True).max_logit_difference == 0.0


def test_pickle_only_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"safe_serialization|safetensors"):
        deepen.open(folder)


def test_disk_full_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepen.checkpoint import writer

    monkeypatch.setattr(writer, "open_output", lambda path: FileIO("/dev/full", "w"))
    with pytest.raises(SaveError, match="No space left"):
        deepen.open(folder).apply("0-2").save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]
