"""Merging layers: equal ones to themselves, others to a point between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.computed import computed_names
from deepen.checkpoint.tiny import output_of, tiny_inputs
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.surgery.merge import lerp, slerp
from tests.assets import smollm2_gguf
from tests.surgery.cases import checkpoint, layer, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox", "bert", "opt", "mamba")
WAYS = ("mean", "lerp", "slerp")


def equal_pair(model: PreTrainedModel) -> None:
    layer(model, 3).load_state_dict(layer(model, 2).state_dict())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("merge") / "llama", "llama")


@pytest.mark.method("merge")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", WAYS)
def test_equal_layers_merge_to_themselves_exactly(how, dtype: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "llama", "llama", equal_pair, dtype)
    merged, told = deepen.merge(ck, 2, 3, how=how, weight=0.3)
    assert (told.after, told.dropped, told.merged) == ("0-1 6 4-5", (2, 3), {6: (2, 3)})
    assert torch.equal(outputs(merged), outputs(ck.apply("0-2 4-5")))
    for name, full in merged.disk["text"].layers[6].items():
        assert torch.equal(merged.source.read(full), ck.source.read(ck.disk["text"].layers[2][name])), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_layer_is_the_mean_and_is_saved_as_any_layer(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    merged, _ = deepen.merge(ck, 2, 4)
    disk = merged.disk[ck.family.towers[-1].name]
    for name, full in disk.layers[6].items():
        parts = [ck.source.read(disk.layers[index][name]).double() for index in (2, 3, 4)]
        assert torch.allclose(merged.source.read(full).double(), torch.stack(parts).mean(0), atol=1e-6), name
    told = merged.save(tmp_path / "merged")
    assert told.form == "plain"
    assert len(told.computed) == len(disk.layers[6])
    assert not set(told.dropped) & computed_names(merged.source)
    again = deepen.open(tmp_path / "merged")
    assert torch.equal(outputs(again), outputs(merged))
    assert again.cost().params == merged.cost().params < ck.cost().params
    assert again.depth == {next(iter(ck.depth)): 4}


def test_a_merged_layer_loads_in_transformers(llama: Checkpoint, tmp_path: Path) -> None:
    merged, _ = deepen.merge(llama, 0, 1, how="lerp", weight=0.25)
    merged.save(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(output_of(plain, tiny_inputs(plain, tokens=16)), outputs(merged))


def test_the_bank_keeps_what_was_merged(llama: Checkpoint) -> None:
    merged, _ = deepen.merge(llama, 2, 3)
    assert merged.depth == {"text": 7}
    assert merged.identity == llama.program
    assert torch.equal(outputs(merged.apply("0-5")), outputs(llama))
    twice, told = deepen.merge(merged, 0, 1)
    assert (told.after, told.merged) == ("7-6 4-5", {7: (0, 1)})
    assert math.isfinite(outputs(twice).sum().item())


@pytest.mark.parametrize("how", ["lerp", "slerp"])
def test_the_ends_of_a_path_are_the_layers(llama: Checkpoint, how) -> None:
    for weight, kept in ((0, "0-2 4-5"), (1, "0-1 3-5")):
        merged, _ = deepen.merge(llama, 2, 3, how=how, weight=weight)
        assert off(outputs(merged), outputs(llama.apply(kept))) < 1e-5


def test_the_arc_keeps_the_norm_and_the_line_does_not() -> None:
    one, two = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    for weight in (0.25, 0.5, 0.75):
        assert slerp(one, two, weight).norm().item() == pytest.approx(3)
        assert lerp(one, two, weight).norm().item() < 2.9
    angle = math.pi / 2 * 0.25
    assert torch.allclose(slerp(one, two, 0.25), 3 * torch.tensor([[math.cos(angle), math.sin(angle)]]))


@pytest.mark.parametrize("two", [[2.0, 4.0], [-1.0, -2.0], [0.0, 0.0], [1.0, 2.0001]])
def test_between_parallel_vectors_the_arc_is_the_line(two: list[float]) -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor(two)
    assert torch.equal(slerp(one, other, 0.3), lerp(one, other, 0.3))


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.merge(ck, 4, 6), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.merge(ck, 3, 3), UsageError, "at least two"),
        (
            lambda ck: deepen.merge(ck, 2, 3, how=cast("Any", "slurp")),
            UsageError,
            r"no way 'slurp' \(did you mean 'slerp'\?\)",
        ),
        (lambda ck: deepen.merge(ck, 2, 4, how="lerp"), UsageError, "lerp is between two layers, got 3"),
        (lambda ck: deepen.merge(ck, 2, 3, weight=1.5), UsageError, "from 0 to 1, got 1.5"),
        (lambda ck: deepen.merge(ck.apply("0 (1-3)*2 4-5"), 1, 2), ProgramError, "layer 1 is visited nowhere outside"),
        (lambda ck: deepen.merge(ck.apply("0-5 1"), 1, 2), ProgramError, "layer 1 is visited at 2 places"),
        (lambda ck: deepen.merge(ck.apply("0 1.f 2-5"), 1, 2), UsageError, r"layer 1 is visited in part \(f\)"),
        (lambda ck: deepen.merge(ck.apply("0 1 @a 2-5"), 1, 2), ProgramError, "not a plain list of layers"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


@pytest.mark.parametrize(
    ("family", "first", "reason"),
    [
        ("gemma2", 2, "layers 2 and 3 are of different kinds: self_attn.layer_type is .sliding_attention. in one"),
        ("qwen3_moe", 3, "layer 3 has experts"),
        ("gemma3n_text", 0, "cannot get a computed layer|different kinds"),
        ("jamba", 2, "different kinds|has experts"),
    ],
)
def test_layers_of_different_kinds_are_refused_by_name(family: str, first: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=reason):
        deepen.merge(checkpoint(tmp_path / family, family), first, first + 1)


def test_smollm2_reads_a_merged_layer(tmp_path: Path) -> None:
    ck = deepen.open(smollm2_gguf())
    merged, _ = deepen.merge(ck, 12, 13, how="slerp")
    name = "self_attn.q_proj.weight"
    got = merged.source.read(merged.disk["text"].layers[30][name])
    ends = [ck.source.read(ck.disk["text"].layers[index][name]) for index in (12, 13)]
    assert torch.allclose(got, slerp(ends[0], ends[1], 0.5), atol=1e-6)
    assert merged.cost().layers == 29
    assert merged.cost().params < ck.cost().params
