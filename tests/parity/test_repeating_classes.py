"""ALBERT: a class that visits each of its few layers several times in a row is a program with loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import deepen
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs


@pytest.mark.parametrize(
    ("groups", "visits", "program"),
    [(1, 12, "0*12"), (2, 6, "0*3 1*3"), (3, 4, "0*2 1-2"), (4, 4, "0-3")],
)
def test_the_default_program_is_what_the_class_runs(tmp_path: Path, groups: int, visits: int, program: str) -> None:
    model = tiny_checkpoint(tmp_path / "m", "albert", num_hidden_groups=groups, num_hidden_layers=visits)
    inputs = tiny_inputs(model)
    ck = deepen.open(tmp_path / "m")
    assert str(ck.program) == program
    assert len(ck.plan().visits) == visits
    assert torch.equal(output_of(ck.load(), inputs), output_of(model, inputs))


def test_a_bank_of_one_runs_and_stays_plain_at_any_depth(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "m", "albert", num_hidden_groups=1, num_hidden_layers=12)
    inputs = tiny_inputs(model)
    shorter = deepen.open(tmp_path / "m").apply("(0)*5")
    changes = shorter.save(tmp_path / "five")
    assert (changes.form, changes.config["num_hidden_layers"]) == ("plain", (12, 5))
    # the class itself, told to visit its layer five times
    model.config.num_hidden_layers = 5
    expected = output_of(model, inputs)
    assert torch.equal(output_of(shorter.load(), inputs), expected)
    assert torch.equal(output_of(AutoModel.from_pretrained(tmp_path / "five"), inputs), expected)


def test_an_uneven_program_is_native_and_its_bake_has_one_layer_a_visit(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "m", "albert", num_hidden_groups=2, num_hidden_layers=6)
    inputs = tiny_inputs(model)
    uneven = deepen.open(tmp_path / "m").apply("0 (1)*2 0")
    expected = output_of(uneven.load(), inputs)
    assert uneven.save(tmp_path / "native").form == "native"
    assert torch.equal(output_of(deepen.open(tmp_path / "native").load(), inputs), expected)
    uneven.save(tmp_path / "baked", bake=True)
    baked = AutoModel.from_pretrained(tmp_path / "baked")
    assert (baked.config.num_hidden_groups, baked.config.num_hidden_layers) == (4, 4)
    torch.testing.assert_close(output_of(baked, inputs), expected)
