"""Models of any depth from a few layers: along a line, or stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.surgery.learngene import stage_list
from tests.surgery.cases import checkpoint, layer, off, outputs

FAMILIES = ("llama", "gpt2", "gpt_neox", "bert", "opt", "mamba", "qwen3_moe")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("learngene") / "llama", "llama")


def tensors(ck: Checkpoint, index: int) -> dict[str, torch.Tensor]:
    disk = ck.disk[ck.family.towers[-1].name]
    return {name: ck.source.read(full).double() for name, full in disk.layers[index].items()}


@pytest.mark.method("expand-linear")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offset", [0, -1])
def test_layers_lie_on_the_line(family: str, offset: int, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    made, told = deepen.expand_linear(ck, 3, base=4, slope=1, offset=offset)
    assert (told.after, told.merged) == ("6-8", {6: (4, 1), 7: (4, 1), 8: (4, 1)})
    base, slope = tensors(ck, 4), tensors(ck, 1)
    layers = [tensors(made, index) for index in (6, 7, 8)]
    assert base
    for name in base:
        for number, found in enumerate(layers, 1):
            wanted = base[name] + (number + offset) / 3 * slope[name]
            assert torch.allclose(found[name], wanted, atol=1e-6), name
        assert torch.allclose(layers[1][name], (layers[0][name] + layers[2][name]) / 2, atol=1e-6), name
    made.save(tmp_path / "made")
    again = deepen.open(tmp_path / "made")
    assert list(again.depth.values()) == [3]
    assert torch.equal(outputs(again), outputs(made))
    assert again.cost().params == made.cost().params < ck.cost().params


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_slope_of_nothing_is_the_loop_of_the_base(family: str, tmp_path: Path) -> None:
    def plant(model: PreTrainedModel) -> None:
        for parameter in layer(model, 1).parameters():
            parameter.zero_()

    ck = checkpoint(tmp_path / family, family, plant)
    made, _ = deepen.expand_linear(ck, 5, base=0, slope=1)
    assert torch.equal(outputs(made), outputs(ck.apply("0*5")))
    assert off(outputs(deepen.expand_linear(ck, 5, base=0, slope=2)[0]), outputs(ck.apply("0*5"))) > 1e-3


def test_the_last_of_a_line_is_base_and_slope_together_and_the_bank_stays(llama: Checkpoint) -> None:
    for depth in (1, 2, 7):
        made, _ = deepen.expand_linear(llama, depth, base=0, slope=1)
        last = tensors(made, 5 + depth)
        assert all(torch.allclose(last[name], each + tensors(llama, 1)[name], atol=1e-6)
                   for name, each in tensors(llama, 0).items())  # fmt: skip
        assert torch.equal(outputs(made.apply("0-5")), outputs(llama))


@pytest.mark.method("expand-stages")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_of_the_trained_depth_gives_its_outputs(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family).apply("0*3 1*3 2*4 3*3 4*3")
    trained = [stage for stage, count in enumerate((3, 3, 4, 3, 3)) for _ in range(count)]
    made, told = deepen.expand_stages(ck, stages=trained, measure=True)
    assert (told.max_logit_difference, told.shared) == (0.0, ())
    assert torch.equal(outputs(made), outputs(ck))
    twelve, told = deepen.expand_stages(ck, 12)
    assert [visit.key.layer for visit in twelve.plan().visits] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(twelve.plan().keys) == 12
    assert "3 of layer 0, 3 of layer 1, 2 of layer 2, 2 of layer 3, 2 of layer 4" in told.note
    assert torch.equal(outputs(twelve), outputs(ck.apply("0*3 1*3 2*2 3*2 4*2")))


def test_the_rule_for_other_depths() -> None:
    assert stage_list(5, 12) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert stage_list(2, 2) == [0, 1]
    for depth in range(5, 30):
        counts = [stage_list(5, depth).count(stage) for stage in range(5)]
        assert sum(counts) == depth
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1


def test_stages_are_the_layers_in_the_order_of_the_program(llama: Checkpoint) -> None:
    made, told = deepen.expand_stages(llama.apply("5*2 1*2"), stages=[0, 1, 1])
    assert told.after == "5 1 1!"
    assert made.plan().keys[0].layer == 5


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.expand_linear(ck, 0, base=0, slope=1), UsageError, "a depth of 1 or more, got 0"),
        (lambda ck: deepen.expand_linear(ck, 3, base=0, slope=6), ProgramError, "layer 6 does not exist"),
        (lambda ck: deepen.expand_stages(ck, 5), UsageError, "6 stages need 6 layers or more, got 5"),
        (lambda ck: deepen.expand_stages(ck), UsageError, "either a depth or stages="),
        (lambda ck: deepen.expand_stages(ck, 6, stages=[0]), UsageError, "either a depth or stages="),
        (lambda ck: deepen.expand_stages(ck, stages=[0, 2, 1]), UsageError, r"do not go back, got \[0, 2, 1\]"),
        (lambda ck: deepen.expand_stages(ck, stages=[0, 6]), UsageError, "stages from 0 to 5"),
        (lambda ck: deepen.expand_stages(ck, stages=[]), UsageError, "got none"),
        (lambda ck: deepen.expand_stages(ck.apply("0 0!"), 4), UsageError, "has the copy 0!1"),
    ],
)
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


def test_a_line_through_layers_of_two_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="layers 2 and 3 are of different kinds: self_attn"):
        deepen.expand_linear(checkpoint(tmp_path / "gemma2", "gemma2"), 3, base=2, slope=3)
