"""Retrofitted recurrence: a prelude, a looped core, a coda."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.errors import FamilyError, ProgramError, UsageError
from tests.surgery.cases import checkpoint, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "opt", "mamba", "qwen3_moe")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("retrofit") / "llama", "llama")


@pytest.mark.method("retrofit")
@pytest.mark.parametrize("family", FAMILIES)
def test_one_passage_is_the_program_without_the_dropped_layers(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    looped, told = deepen.retrofit(ck, prelude=1, core=2, coda=1, turns=3)
    assert (told.after, told.dropped, told.shared) == ("0 (3-4)*1..3 5", (1, 2), ("3", "4"))
    model: Any = looped.load()
    inputs = tiny_inputs(model, tokens=16)
    for count, same in ((1, "0 3-5"), (2, "0 3-4 3-5"), (3, "0 3-4 3-4 3-5")):
        model.deepen.set_counts(count)
        assert torch.equal(output_of(model, inputs), outputs(ck.apply(same))), count
    assert looped.cost().params == ck.apply("0 3-5").cost().params < ck.cost().params
    once, _ = deepen.retrofit(ck, prelude=1, core=2, coda=1, turns=1)
    assert once.program == ck.apply("0 3-5").program


def test_the_parts_of_22_layers_are_those_of_the_paper(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=22)
    ck = deepen.open(tmp_path / "llama")
    looped, told = deepen.retrofit(ck, prelude=4, core=8, coda=4, turns=8)
    assert told.after == "0-3 (10-17)*1..8 18-21"
    assert told.dropped == (4, 5, 6, 7, 8, 9)
    least = looped.apply("0-3 10-21").cost()
    assert least.params < 0.75 * ck.cost().params
    assert looped.cost().path == pytest.approx(8 + 8 * 8)


def test_it_is_saved_and_a_count_may_be_fixed(llama: Checkpoint, tmp_path: Path) -> None:
    looped, _ = deepen.retrofit(llama, prelude=2, core=3, coda=0, turns=4, least=2)
    assert str(looped.program) == "0-1 (3-5)*2..4"
    looped.save(tmp_path / "looped")
    again = deepen.open(tmp_path / "looped")
    assert str(again.program) == "0-1 (2-4)*2..4"
    assert torch.equal(outputs(again), outputs(looped))
    fixed, _ = deepen.retrofit(llama, prelude=2, core=3, coda=0, turns=4, least=4)
    assert str(fixed.program) == "0-1 (3-5)*4"
    assert torch.equal(outputs(fixed), outputs(looped))
    assert off(outputs(fixed), outputs(llama)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"core": 5}, UsageError, "do not fit the 6 visits of the program"),
        ({"core": 0}, UsageError, "a core of at least 1"),
        ({"prelude": -1}, UsageError, "a prelude of -1"),
        ({"turns": 0}, UsageError, "least= from 1 to turns=, got 1 and 0"),
        ({"least": 4}, UsageError, "got 4 and 3"),
        ({"least": 0}, UsageError, "got 0 and 3"),
        ({"turns": 5000}, ProgramError, "the limit is 4096"),
        ({"tower": "vision"}, FamilyError, "no tower 'vision'"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, changes, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        deepen.retrofit(llama, **{"prelude": 1, "core": 2, "coda": 1, "turns": 3, **changes})


def test_a_program_with_loops_has_no_core_to_choose(llama: Checkpoint) -> None:
    with pytest.raises(ProgramError, match="not a plain list of layers"):
        deepen.retrofit(llama.apply("0 (1-3)*2 4-5"), prelude=1, core=2, coda=1, turns=2)
