"""Transforms that change the program only: drop, loop, parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.reference import step_by_step
from deepen.checkpoint.tiny import output_of, tiny_inputs
from deepen.errors import FamilyError, ProgramError, UsageError
from tests.surgery.cases import checkpoint, layer, off, outputs, silence

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("programs") / "llama", "llama")


@pytest.mark.method("drop")
@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_none_is_the_identity_and_dropping_some_the_program_without_them(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    same, told = deepen.drop(ck, [])
    assert same.program == ck.program
    assert told.dropped == ()
    assert torch.equal(outputs(same), outputs(ck))
    small, told = deepen.drop(ck, [3, 1])
    assert told.dropped == (1, 3)
    assert told.renumbered == {2: 1, 4: 2, 5: 3}
    by_hand = ck.apply("0 2 4-5")
    assert small.program == by_hand.program
    assert torch.equal(outputs(small), outputs(by_hand))
    assert off(outputs(small), outputs(ck)) > 1e-3
    assert small.save(tmp_path / "small").form == "plain"
    assert torch.equal(outputs(deepen.open(tmp_path / "small")), outputs(small))


@pytest.mark.method("drop-block")
def test_a_dropped_block_keeps_cached_decoding_and_a_silent_one_the_function(tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        for index in (2, 3):
            silence(layer(model, index), "self_attn.o_proj", "mlp.down_proj")

    ck = checkpoint(tmp_path / "llama", "llama", plant)
    small, told = deepen.drop_block(ck, 2, 2)
    assert (told.dropped, told.after) == ((2, 3), "0-1 4-5")
    assert torch.equal(outputs(small), outputs(ck))
    model = small.load()
    inputs = tiny_inputs(model, tokens=16)
    assert off(step_by_step(model, inputs, 4), output_of(model, inputs)) < 1e-5
    assert deepen.drop_block(ck, 2, 0)[0].program == ck.program


@pytest.mark.method("damped-loop")
@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_a_damped_loop_of_a_constant_update_is_one_visit(times: int, tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        for part in ("attn", "mlp"):
            layer(model, 2).get_parameter(f"{part}.c_proj.weight").zero_()

    ck = checkpoint(tmp_path / "gpt2", "gpt2", plant)
    damped, told = deepen.loop(ck, 2, 2, times)
    assert off(outputs(damped), outputs(ck)) < 1e-5
    assert told.shared == (("2",) if times > 1 else ())
    plain, _ = deepen.loop(ck, 2, 2, times, scale=1)
    assert plain.program == ck.apply(f"0-1 2*{times} 3-5" if times > 1 else "0-5").program
    assert (off(outputs(plain), outputs(ck)) > 1e-3) == (times > 1)


def test_a_loop_takes_one_step_a_turn(llama: Checkpoint, tmp_path: Path) -> None:
    looped, _ = deepen.loop(llama, 1, 2, 2, scale=(1.0, 0.0))
    assert off(outputs(looped), outputs(llama)) < 1e-5
    half, _ = deepen.loop(llama, 1, 2, 2, scale=(1.0, 0.5))
    assert off(outputs(half), outputs(llama)) > 1e-3
    assert half.save(tmp_path / "half").form == "native"
    assert torch.equal(outputs(deepen.open(tmp_path / "half")), outputs(half))


@pytest.mark.method("parallel")
def test_a_pair_is_exact_where_the_second_does_not_read_the_first(tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        silence(layer(model, 2), "self_attn.o_proj", "mlp.down_proj")

    ck = checkpoint(tmp_path / "llama", "llama", plant)
    exact, told = deepen.parallel(ck, 2, 3)
    assert told.after == "0-1 {2|3} 4-5"
    assert told.dropped == ()
    assert off(outputs(exact), outputs(ck)) < 1e-5
    other, _ = deepen.parallel(ck, 3, 4)
    assert off(outputs(other), outputs(ck)) > 1e-3
    three, told = deepen.parallel(ck, 1, 4, width=3)
    assert told.after == "0 {1|2|3} 4-5"
    assert three.cost().path < ck.cost().path


def test_transforms_compose(llama: Checkpoint) -> None:
    small, _ = deepen.drop(llama, [3])
    looped, told = deepen.loop(small, 1, 2, 2)
    assert told.after == "0 (1-2)*2[scale=1/2] 4-5"
    assert told.before == "0-2 4-5"
    assert looped.apply("0-5").program == llama.program


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.drop(ck, [6]), ProgramError, r"layer 6 does not exist \(the text tower stores 6: 0-5\)"),
        (lambda ck: deepen.drop(ck, [-1]), ProgramError, "layer -1 does not exist"),
        (lambda ck: deepen.drop(ck, range(6)), ProgramError, "visits at least one layer"),
        (lambda ck: deepen.drop(deepen.drop(ck, [3])[0], [3]), ProgramError, "does not visit layer 3"),
        (lambda ck: deepen.drop(ck, [1], tower="vision"), FamilyError, "no tower 'vision'"),
        (lambda ck: deepen.drop_block(ck, 4, 3), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.drop_block(ck, 4, -1), UsageError, "0 layers or more, got -1"),
        (lambda ck: deepen.loop(ck, 1, 2, 0), UsageError, "at least once, got 0"),
        (lambda ck: deepen.loop(ck, 1, 2, 3, scale=(1, 0.5)), UsageError, "3 turns need 3 steps, got 2"),
        (lambda ck: deepen.loop(ck, 4, 2, 2), ProgramError, "layer 4 is visited after layer 2"),
        (lambda ck: deepen.parallel(ck, 2, 2), UsageError, "at least two"),
        (lambda ck: deepen.parallel(ck, 2, 3, width=1), UsageError, "at least 2 layers side by side"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


def test_layers_that_normalise_the_stream_are_not_run_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="a layer of bert changes the stream itself"):
        deepen.parallel(checkpoint(tmp_path / "bert", "bert"), 1, 2)
