"""Block expansion: new layers that add nothing at first, and are trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import tiny_inputs
from deepen.cli import main
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.optim import trained
from deepen.train.recipe import Recipe
from deepen.train.select import select_layers
from tests.cli.models import TEXT
from tests.cli.models import checkpoint as text_checkpoint
from tests.surgery.cases import checkpoint, outputs
from tests.train.text_model import weights

# With and without biases, serial and parallel parts, one part, experts, norms behind the parts, parts without a module.
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "falcon", "opt", "mamba", "qwen3_moe", "starcoder2", "olmo2")
RECIPE = Recipe(steps=4, batch=2, lr=1e-2, warmup=0, eval_every=0, weight_decay=0.5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("expand") / "llama", "llama")


@pytest.mark.method("expand")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_outputs_stay_bit_for_bit_also_when_saved(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    larger, told = deepen.expand(ck, 2, measure=True)
    assert (told.after, told.same_as, told.max_logit_difference) == ("0-2 2!zero 3-5 5!zero", "0-5", 0.0)
    assert told.copied == ("2!1", "5!1")
    assert torch.equal(outputs(larger), outputs(ck))
    assert larger.cost().params > ck.cost().params
    saved = larger.save(tmp_path / "larger")
    again = deepen.open(tmp_path / "larger")
    assert torch.equal(outputs(again), outputs(ck))
    if saved.form == "plain":
        assert list(again.depth.values()) == [8]
        assert told.note.endswith("a save makes them the layers 3, 7")


@pytest.mark.parametrize("family", FAMILIES)
def test_training_the_new_layers_changes_no_tensor_of_the_model(family: str, tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / family, family)
    larger, told = deepen.expand(ck, 2)
    model: Any = larger.load()
    tower = ck.family.tower("").name
    select_layers(model, told.copied, tower)
    held, ids = weights(model), tiny_inputs(model)["input_ids"]
    new = {child for child, key in model.deepen.keys().items() if key.copy is not None}
    assert {number_of(name) for name in trained(model)} == new
    losses = train(model, lambda _: ids, RECIPE, loss=CrossEntropy()).losses
    moved = {name for name, each in weights(model).items() if not torch.equal(each, held[name])}
    assert {number_of(name) for name in moved} == new
    assert losses[-1] < losses[0]


def test_heal_trains_the_new_layers_by_the_names_that_the_report_gives(tmp_path: Path) -> None:
    text_checkpoint(tmp_path / "model", bos=True)
    (tmp_path / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    ck = deepen.open(tmp_path / "model")
    _, told = deepen.expand(ck, 2)
    options = ["--data", str(tmp_path / "text.txt"), "--context", "32", "--batch", "4", "--steps", "8", "--lr", "1e-2"]
    options += ["--held-out-tokens", "128", "--mode", "layers", "--layers", ",".join(told.copied), "--warmup", "0"]
    assert main(["heal", str(tmp_path / "model"), told.after, *options, "-o", str(tmp_path / "out")]) == 0
    healed = deepen.open(tmp_path / "out")
    assert healed.depth == {"text": 8}
    old, new = (each.load().state_dict() for each in (ck, healed))
    numbers = {0: 0, 1: 1, 2: 2, 3: 4, 4: 5, 5: 6}
    for name, each in old.items():
        at = number_of(name) if ".layers." in name else None
        now = name if at is None else name.replace(f".layers.{at}.", f".layers.{numbers[int(at)]}.")
        assert torch.equal(new[now], each), name
    assert new["model.layers.3.mlp.down_proj.weight"].any()
    assert new["model.layers.7.mlp.down_proj.weight"].any()
    assert main(["heal", str(tmp_path / "model"), *options, "--layers", "2!", "-o", str(tmp_path / "no")]) == 2
    assert not list(tmp_path.glob("no*"))


def number_of(name: str) -> str:
    """The number of the layer that a parameter belongs to."""
    return next(piece for piece in name.split(".") if piece.isdecimal())


def test_at_first_only_the_zero_matrices_get_a_gradient(llama: Checkpoint) -> None:
    larger, _ = deepen.expand(llama, 1)
    model = larger.load()
    select_layers(model, ["5!1"], "text")
    CrossEntropy()(model, tiny_inputs(model)["input_ids"]).backward()
    sizes = {name: each.grad for name, each in model.named_parameters()}
    assert all(grad is None for name, grad in sizes.items() if ".layers.6." not in name)
    for name, grad in sizes.items():
        if grad is not None:
            assert bool(grad.any()) == name.endswith(("o_proj.weight", "down_proj.weight")), name


@pytest.mark.parametrize(("groups", "copies", "after"), [
    (1, 2, "0-5 5!zero 5!zero"),
    (6, 1, "0 0!zero 1 1!zero 2 2!zero 3 3!zero 4 4!zero 5 5!zero"),
    (3, 0, "0-5"),
])  # fmt: skip
def test_groups_and_copies(llama: Checkpoint, groups: int, copies: int, after: str) -> None:
    larger, told = deepen.expand(llama, groups, copies=copies)
    assert told.after == after
    assert len(told.copied) == groups * copies
    assert torch.equal(outputs(larger), outputs(llama))


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck: deepen.expand(ck, 4), UsageError, "6 visits cannot be cut into 4 groups .* one of 1, 2, 3, 6"),
        (lambda ck: deepen.expand(ck, 0), UsageError, "into 0 groups"),
        (lambda ck: deepen.expand(ck, 2, copies=-1), UsageError, "0 or more new layers after each group, got -1"),
        (lambda ck: deepen.expand(ck.apply("0-5 (1-2)*2"), 2), ProgramError, "`0-5 .1-2..2` is not a plain list"),
        (lambda ck: deepen.expand(deepen.expand(ck, 1)[0], 1), ProgramError, "has the copy 5!1; save the checkpoint"),
        (lambda ck: select_layers(deepen.expand(ck, 1)[0].load(), ["4!1"], "text"), UsageError,
         "visits no layer 4!1; it visits 0, 1, 2, 3, 4, 5, 5!1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(llama: Checkpoint, call, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(llama)


def test_where_a_norm_follows_the_addition_no_layer_does_nothing(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="2!1 cannot be a zero copy: a layer of bert changes the stream"):
        deepen.expand(checkpoint(tmp_path / "bert", "bert"), 2)
