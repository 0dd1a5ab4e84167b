"""Tying layers into a loop, and adapters for each turn from what tying took away."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.errors import CheckpointError, FamilyError, ProgramError, UsageError
from deepen.surgery.relax import factors
from tests.surgery.cases import checkpoint, layer, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox")
WAYS = ("stepwise", "average", "lower")


def tied_already(model: PreTrainedModel) -> None:
    """Layers 0 and 3, 1 and 4, 2 and 5 are equal."""
    for index in range(3):
        layer(model, index + 3).load_state_dict(layer(model, index).state_dict())


def same_norms(model: PreTrainedModel) -> None:
    """All layers have the norms and biases of the first."""
    first = dict(layer(model, 0).named_parameters())
    for index in range(1, 6):
        for name, parameter in layer(model, index).named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(first[name])


def full_rank(ck: Checkpoint) -> int:
    """The largest rank that a matrix of a layer can have."""
    return max(min(each.shape) for each in layer(ck.load(), 0).parameters() if each.ndim == 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("tie") / "llama", "llama", same_norms)


@pytest.mark.method("tie")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_layers_give_the_original(family: str, how: Any, tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        tied_already(model)
        if how == "stepwise":
            # its layers are 0, 2 and 5
            for index in (1, 4):
                layer(model, index).load_state_dict(layer(model, 2).state_dict())

    ck = checkpoint(tmp_path / family, family, plant)
    looped, told = deepen.tie(ck, 2, how=how)
    assert off(outputs(looped), outputs(ck)) < 1e-6
    assert len(told.shared) == 3
    assert looped.cost().params < ck.cost().params
    assert looped.save(tmp_path / "saved").form == "native"
    assert torch.equal(outputs(deepen.open(tmp_path / "saved")), outputs(looped))


def test_which_layers_stay(llama: Checkpoint) -> None:
    def text(*args: Any, **options: Any) -> str:
        return deepen.tie(llama, *args, **options)[1].after

    assert text(2) == "(0 2 5)*2"
    assert text(3) == "(0 5)*3"
    assert text(6) == "0*6"
    assert text(3, how="lower") == "(0-1)*3"
    assert text(2, how="average") == "(6-8)*2"
    assert text(2, how="lower", first=1, last=4) == "0 (1-2)*2 5"
    looped, told = deepen.tie(llama, 2, how="average", first=1, last=4)
    assert (told.after, told.merged) == ("0 (6-7)*2 5", {6: (1, 3), 7: (2, 4)})
    name = "self_attn.q_proj.weight"
    one, two, mean = (looped.source.read(f"model.layers.{index}.{name}") for index in (1, 3, 6))
    assert torch.allclose(mean, (one + two) / 2, atol=1e-7)


@pytest.mark.method("relax")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_rank_and_equal_norms_give_the_original(family: str, how: Any, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family, same_norms)
    full = full_rank(ck)
    relaxed, told = deepen.relax(ck, 2, rank=full, how=how)
    assert told.after.endswith(f"*2[lora={full}]")
    assert off(outputs(relaxed), outputs(ck)) < 1e-4
    assert off(outputs(deepen.tie(ck, 2, how=how)[0]), outputs(ck)) > 1e-2
    assert relaxed.save(tmp_path / "saved").form == "native"
    again = deepen.open(tmp_path / "saved")
    assert torch.equal(outputs(again), outputs(relaxed))
    baked = again.save(tmp_path / "baked", bake=True)
    assert baked.form == "baked"
    assert off(outputs(deepen.open(tmp_path / "baked")), outputs(ck)) < 1e-4


def test_in_fp64_the_original_comes_back_to_rounding(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "llama", "llama", same_norms, dtype="float64")
    relaxed, _ = deepen.relax(ck, 3, rank=full_rank(ck))
    one, two = (each.load() for each in (relaxed, ck))
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert (one(ids).logits - two(ids).logits).abs().max() < 1e-9


def test_each_matrix_lacks_the_tail_of_its_singular_values(llama: Checkpoint) -> None:
    path, errors = "self_attn.o_proj", []
    for rank in (1, 2, 4, 8):
        relaxed, _ = deepen.relax(llama, 2, rank=rank)
        read = relaxed.source.read
        tied = read(f"model.layers.7.{path}.weight").double()
        # layer 4 is turn 1 of the second layer of the loop
        lacking = read(f"model.layers.4.{path}.weight").double() - tied
        stem = f"model.layers.owned.lora.1.1.{path.replace('.', '_')}"
        a, b = (read(f"{stem}.{letter}").double() for letter in "AB")
        values = torch.linalg.svdvals(lacking)
        error = (lacking - 2 * b @ a).square().sum().item()
        assert error == pytest.approx(values[rank:].square().sum().item(), rel=1e-5)
        assert torch.allclose(a @ a.T, torch.eye(rank, dtype=a.dtype), atol=1e-5)
        assert torch.allclose(4 * b.T @ b, values[:rank].square().diag(), atol=1e-5)
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
def test_factors_of_a_poor_or_no_difference_are_finite(shape: tuple[int, int]) -> None:
    for known in (0, 2):
        generator = torch.Generator().manual_seed(1)
        poor = (
            torch.randn(shape[0], 2, generator=generator).double()[:, :known]
            @ torch.randn(known, shape[1], generator=generator).double()
        )
        a, b = factors(poor, 4)
        assert (a.shape, b.shape) == ((4, shape[1]), (shape[0], 4))
        assert torch.isfinite(a).all()
        assert torch.allclose(2 * b @ a, poor, atol=1e-7)


def test_a_relaxed_loop_is_closer_the_higher_the_rank(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "llama", "llama", same_norms)
    parameters = [deepen.relax(ck, 2, rank=rank)[0].cost().params for rank in (1, 2, 8)]
    assert parameters[1] - parameters[0] == (parameters[2] - parameters[0]) / 7
    differences = [
        (outputs(deepen.relax(ck, 2, rank=rank)[0]) - outputs(ck)).square().mean().item() for rank in (1, 8, 15)
    ]
    assert differences == sorted(differences, reverse=True)


def test_refusals(llama: Checkpoint, tmp_path: Path) -> None:
    for error, message, action in (
        (UsageError, "6 layers do not make a loop of 4 turns", lambda: deepen.tie(llama, 4)),
        (UsageError, "6 layers do not make a loop of 1 turns", lambda: deepen.tie(llama, 1)),
        (UsageError, "no way 'averge'.*average", lambda: deepen.tie(llama, 2, how=cast(Any, "averge"))),
        (ProgramError, "begins with no plain layer", lambda: deepen.tie(llama.apply("{0|1} 2-3"), 2)),
        (UsageError, r"layer 1 is visited in part \(a\)", lambda: deepen.tie(llama.apply("0 1.a"), 2)),
        (UsageError, "a rank is at least 1, got 0", lambda: deepen.relax(llama, 2, rank=0)),
        (ProgramError, "lora=999 on layer 6: no matrix has this rank", lambda: deepen.relax(llama, 2, rank=999)),
        (UsageError, "owns parameters already", lambda: deepen.relax(llama.apply("0-4 5[emb]"), 2, rank=1)),
    ):
        with pytest.raises(error, match=message):
            action()
    windows = checkpoint(tmp_path / "gemma2", "gemma2")
    with pytest.raises(FamilyError, match="layers 0 and 3 are of different kinds"):
        deepen.tie(windows, 2)
    with pytest.raises(FamilyError, match="experts"):
        deepen.tie(checkpoint(tmp_path / "moe", "qwen3_moe"), 2, how="average")


def test_codes_are_refused(llama: Checkpoint) -> None:
    from deepen.checkpoint.recipes import Zeros
    from deepen.checkpoint.sources import TensorInfo
    from deepen.surgery.relax import Difference

    codes = Zeros(TensorInfo("I8", (2, 2)))
    with pytest.raises(CheckpointError, match="a matrix of type I8 holds codes"):
        Difference(codes, codes, turned=False)
