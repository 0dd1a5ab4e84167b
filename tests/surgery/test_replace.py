"""A block replaced by a linear map: the least squares, the fold, and the refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import output_of, tiny_inputs, tiny_model
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.surgery.replace import Calibration
from tests.assets import shakespeare_text, smollm2_gguf
from tests.cli.models import TEXT, tokenizer
from tests.surgery.cases import layer, off, outputs, silence

FAMILIES = ("llama", "gpt2", "gpt_neox", "starcoder2")
WIDTH = 32


def with_tokenizer(folder: Path, family: str, silent: int | None = None, dtype: str = "float32") -> Checkpoint:
    model = tiny_model(family)
    if silent is not None:
        with torch.no_grad():
            silence(layer(model, silent), "self_attn.o_proj", "mlp.down_proj")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return deepen.open(folder)


def planted(written: torch.Tensor, added: torch.Tensor, program: str = "0-5") -> Calibration:
    """The normal equations of a block from layer 3 to layer 4, from streams that are given."""
    written, added = written.double(), added.double()
    energy = added.square().sum().item()
    gram, cross = written.T @ written, written.T @ added
    return Calibration(program=program, first=3, last=4, gram=gram, cross=cross, energy=energy, tokens=len(written))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return with_tokenizer(tmp_path_factory.mktemp("replace") / "llama", "llama")


@pytest.fixture(scope="module")
def calibration(llama: Checkpoint) -> Calibration:
    return deepen.calibrate(llama, TEXT, 3, 4, context=32, tokens=640)


@pytest.mark.method("replace-block")
def test_a_linear_block_is_found_exactly_and_a_ridge_draws_to_dropping() -> None:
    torch.manual_seed(0)
    written, true = torch.randn(200, WIDTH), torch.randn(WIDTH, WIDTH)
    exact = planted(written, written @ true)
    found = exact.solve(ridge=0)
    assert torch.allclose(found, true.double(), atol=1e-5)
    assert exact.error(found) < 1e-9
    assert exact.error(torch.zeros_like(found)) == 1
    noisy = planted(written, written @ true + torch.randn(200, WIDTH))
    errors = [noisy.error(noisy.solve(ridge)) for ridge in (0, 0.01, 1, 100, 1e9)]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.1
    assert errors[-1] == pytest.approx(1, abs=1e-3)


def test_directions_that_are_never_written_stay_as_they_are() -> None:
    torch.manual_seed(0)
    written = torch.randn(100, WIDTH)
    written[:, 5:] = 0
    found = planted(written, torch.randn(100, WIDTH)).solve(ridge=0)
    assert torch.equal(found[5:], torch.zeros_like(found[5:]))
    assert found[:5].abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fold_is_the_map_on_what_the_feed_forward_writes(family: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    calibration = deepen.calibrate(ck, TEXT, 3, 4, context=32)
    made, told = deepen.replace_block(ck, 3, 4, calibration)
    assert (told.after, told.dropped, told.merged) == ("0-1 6-5", (2, 3, 4), {6: (2,)})
    assert told.figures["error"] == calibration.error(calibration.solve()) < 1
    assert told.folded[0].endswith("weight")
    inputs = tiny_inputs(ck.load(), tokens=16)
    wrote: dict[str, torch.Tensor] = {}
    streams = {}
    for name, program in (("old", "0-2 @here 5"), ("new", "0-1 6 @here 5")):
        model: Any = made.apply(program).load()
        entry: Any = layer(model, 2)
        entry.layer.mlp.register_forward_hook(lambda module, args, out, name=name: wrote.update({name: out}))
        output_of(model, inputs)
        streams[name] = model.deepen.marks["here"]
    moved = wrote["old"].double() @ calibration.solve()
    assert off(wrote["new"].double(), wrote["old"] + moved) < 1e-5
    assert off(streams["new"].double(), streams["old"] + moved) < 1e-5


def test_the_calibration_is_what_the_streams_are(llama: Checkpoint, calibration: Calibration) -> None:
    marked = llama.apply("0-1 2.a @mixed 2.f @in 3-4 @out 5").load()
    ids = torch.tensor(llama.tokenizer()(TEXT, add_special_tokens=False).input_ids)[:640]
    with torch.no_grad():
        marked(input_ids=ids.view(-1, 32))
    marks = {name: stream.double().flatten(0, 1) for name, stream in marked.deepen.marks.items()}  # pyright: ignore
    written, added = marks["in"] - marks["mixed"], marks["out"] - marks["in"]
    assert calibration.tokens == 640
    assert off(calibration.gram, written.T @ written) < 1e-4
    assert off(calibration.cross, written.T @ added) < 1e-4
    assert calibration.energy == pytest.approx(added.square().sum().item(), rel=1e-5)


def test_a_silent_block_is_replaced_exactly(tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / "llama", "llama", silent=3)
    calibration = deepen.calibrate(ck, TEXT, 3, 3, context=32)
    assert calibration.energy == 0
    made, told = deepen.replace_block(ck, 3, 3, calibration)
    assert told.figures["error"] == 0
    assert torch.equal(outputs(made), outputs(ck))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_result_is_saved_as_a_plain_model(dtype: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / "llama", "llama", dtype=dtype)
    calibration = deepen.calibrate(ck, TEXT, 3, 4, context=32, dtype="float32")
    made, _ = deepen.replace_block(ck, 3, 4, calibration)
    told = made.save(tmp_path / "small")
    assert (told.form, told.computed) == ("plain", ("model.layers.2.mlp.down_proj.weight",))
    assert torch.equal(outputs(deepen.open(tmp_path / "small")), outputs(made))


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck, c: deepen.replace_block(ck, 2, 4, c), UsageError, "of layers 3 to 4 .*, not of layers 2 to 4"),
        (lambda ck, c: deepen.replace_block(ck.apply("0-4"), 3, 4, c), UsageError, "calibrate again"),
        (lambda ck, c: deepen.replace_block(ck, 3, 4, c, ridge=-1), UsageError, "the ridge is 0 or more"),
        (
            lambda ck, c: deepen.replace_block(ck, 3, 4, replace(c, gram=torch.eye(8), cross=torch.eye(8))),
            UsageError,
            "streams of 8 values, the model has 32",
        ),
        (lambda ck, c: deepen.calibrate(ck, TEXT, 0, 1, context=32), ProgramError, "right before layer 0"),
        (lambda ck, c: deepen.calibrate(ck, TEXT, 4, 6, context=32), ProgramError, "layer 6 does not exist"),
        (lambda ck, c: deepen.calibrate(ck.apply("0-1 2.a 3-5"), TEXT, 3, 4), ProgramError, "right before layer 3"),
        (lambda ck, c: deepen.calibrate(ck.apply("0-2 (3-4)*2 5"), TEXT, 3, 4), ProgramError, "nowhere outside of"),
    ],
)
def test_bad_input_is_one_clear_error(
    llama: Checkpoint, calibration: Calibration, call, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        call(llama, calibration)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "layer 2 adds what its feed-forward writes to the stream only after a norm or a factor"),
        ("qwen3_moe", "expected one matrix"),
        ("opt", "a layer of opt cannot take up a linear map: its layer has no feed-forward module"),
        ("bert", "a layer of bert cannot take up a linear map"),
        ("mamba", "a layer of mamba cannot take up a linear map"),
    ],
)
def test_layers_without_a_fold_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    block = (4, 4) if family == "qwen3_moe" else (3, 4)
    with pytest.raises(FamilyError, match=reason):
        deepen.calibrate(with_tokenizer(tmp_path / family, family), TEXT, *block, context=32)


@pytest.mark.slow
def test_on_smollm2_a_map_is_nearer_than_dropping() -> None:
    ck = deepen.open(smollm2_gguf())
    calibration = deepen.calibrate(ck, shakespeare_text(), 20, 22, context=256, tokens=1024)
    made, told = deepen.replace_block(ck, 20, 22, calibration)
    assert told.figures["error"] < 1
    assert made.cost().layers == 27
