"""The training loop: what it lowers, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from deepen.errors import CheckpointError, DataError, SaveError, UsageError
from deepen.train import state as state_file
from deepen.train.data import split
from deepen.train.log import Entry
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy, Distillation
from deepen.train.optim import groups
from deepen.train.recipe import Recipe
from deepen.train.select import select
from deepen.train.stops import NotFinite, Stopped
from tests.train.text_model import Bag, counting, weights

RECIPE = Recipe(steps=30, batch=4, lr=1e-2, warmup=3, eval_every=0, save_every=10)
LOSS = CrossEntropy()


def with_changes(**changes: object) -> Recipe:
    return Recipe(**{**vars(RECIPE), **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_falls_below_that_of_a_rate_of_nothing(seed: int) -> None:
    ends = []
    for lr in (1e-2, 1e-12):
        run = train(Bag(seed), counting(seed=seed), with_changes(lr=lr, seed=seed, steps=60), loss=LOSS)
        ends.append(sum(run.losses[-5:]) / 5)
    assert ends[0] < 0.8 * ends[1]


def test_norms_and_biases_do_not_decay_and_every_parameter_is_in_one_group() -> None:
    decayed, plain = groups(Bag())
    assert sorted(decayed) == ["embed.weight", "head.weight", "inner.weight"]
    assert sorted(plain) == ["head.bias", "inner.bias", "norm.bias", "norm.weight"]
    tied = Bag()
    tied.head.weight = tied.embed.weight
    decayed, plain = groups(tied)
    assert sorted(decayed) == ["embed.weight", "inner.weight"]


def test_a_matrix_inside_a_norm_does_not_decay() -> None:
    model = Bag()
    model.norm.weight = torch.nn.Parameter(torch.ones(2, 3))
    assert "norm.weight" in groups(model)[1]


def test_unselected_parameters_do_not_move_though_decay_and_momentum_are_on() -> None:
    model = Bag()
    train(model, counting(), with_changes(weight_decay=0.5), loss=LOSS)
    before = weights(model)
    select(model, ["inner.*"])
    train(model, counting(), with_changes(weight_decay=0.5), loss=LOSS)
    moved = {name for name, each in weights(model).items() if not torch.equal(each, before[name])}
    assert moved == {"inner.weight", "inner.bias"}


def test_weight_decay_moves_what_is_selected() -> None:
    norms = []
    for decay in (0.0, 5.0):
        model = Bag()
        train(model, counting(), with_changes(weight_decay=decay), loss=LOSS)
        norms.append(model.inner.weight.norm().item())
    assert norms[1] < 0.9 * norms[0]


def test_two_halves_of_a_batch_make_one() -> None:
    whole, halves = Bag(), Bag()
    # clipping would hide a gradient of another size
    one_piece, two_pieces = (with_changes(steps=1, accumulate=pieces, clip=1e9) for pieces in (1, 2))
    loss = train(whole, counting(), one_piece, loss=LOSS).losses[0]
    assert train(halves, counting(), two_pieces, loss=LOSS).losses[0] == pytest.approx(loss, abs=1e-6)
    for one, two in zip(whole.parameters(), halves.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert (one.grad - two.grad).abs().max() < 1e-6
    assert not torch.equal(whole.inner.weight, Bag().inner.weight)


def test_clipping_scales_the_gradient_and_the_log_has_its_size_before() -> None:
    model, entries = Bag(), list[Entry]()
    train(model, counting(), with_changes(steps=1, clip=0.01), loss=LOSS, report=entries.append)
    size = math.sqrt(sum(each.grad.square().sum().item() for each in model.parameters() if each.grad is not None))
    assert size == pytest.approx(0.01, rel=1e-3)
    assert entries[0].grad_norm > 0.1


def test_the_rate_rises_and_then_falls_along_a_cosine() -> None:
    recipe = Recipe(steps=110, warmup=10, lr=1.0, floor=0.2)
    assert [recipe.lr_at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert recipe.lr_at(10) == 1.0
    assert recipe.lr_at(60) == pytest.approx(0.6)
    assert recipe.lr_at(110) == pytest.approx(0.2)


def test_an_epoch_reads_every_window_once_in_an_order_of_its_own() -> None:
    batches = counting(windows=8, batch=4)
    firsts = [batches(step)[:, 0].tolist() for step in range(4)]
    assert sorted(firsts[0] + firsts[1]) == sorted(batches.windows[:, 0].tolist())
    assert firsts[:2] != firsts[2:]
    assert batches(1).tolist() == counting(windows=8, batch=4)(1).tolist()
    assert counting(windows=8, seed=1)(0).tolist() != batches(0).tolist()


def test_autocast_computes_in_bfloat16_and_keeps_the_weights_in_float32() -> None:
    seen = set[torch.dtype]()
    model = Bag()
    model.head.register_forward_hook(lambda _module, _given, out: seen.add(out.dtype))
    train(model, counting(), with_changes(steps=2, autocast=True), loss=LOSS)
    assert seen == {torch.bfloat16}
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_a_model_learns_nothing_from_itself() -> None:
    model, ids = Bag(), counting()(0)
    loss = Distillation(teacher=Bag(), weight=1.0, temperature=2.0)(model, ids)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-7)
    assert max(each.grad.abs().max().item() for each in model.parameters() if each.grad is not None) < 1e-7


@pytest.mark.method("distillation")
def test_distillation_is_its_formula() -> None:
    model, teacher, ids = Bag(0), Bag(1), counting()(0)
    mine, theirs = (each(ids).logits[:, :-1].double() / 3.0 for each in (model, teacher))
    p = theirs.softmax(-1)
    kl = (p * (p.log() - mine.log_softmax(-1))).sum(-1).mean()
    expected = 0.25 * LOSS(model, ids) + 0.75 * 9.0 * kl
    got = Distillation(teacher=teacher, weight=0.75, temperature=3.0)(model, ids)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distillation_brings_the_model_nearer_to_its_teacher(seed: int) -> None:
    teacher, model = Bag(seed + 10), Bag(seed)
    loss = Distillation(teacher=teacher, weight=1.0)
    before = loss(model, counting()(0)).item()
    held = weights(teacher)
    train(model, counting(), with_changes(steps=60), loss=loss)
    assert loss(model, counting()(0)).item() < 0.5 * before
    assert all(torch.equal(each, held[name]) for name, each in weights(teacher).items())


def test_nan_in_a_forward_pass_names_the_step_and_the_module() -> None:
    model = Bag()

    def poison(entry: Entry) -> None:
        if entry.step == 3:
            model.inner.weight.data[0, 0] = math.nan

    with pytest.raises(NotFinite, match=r"step 4: the loss is nan, first at the output of inner;"):
        train(model, counting(), RECIPE, loss=LOSS, report=poison)


def test_an_infinite_gradient_names_the_step_and_the_parameter_and_moves_nothing() -> None:
    model = Bag()
    model.inner.weight.register_hook(lambda grad: grad * math.inf)
    before = weights(model)
    with pytest.raises(NotFinite, match=r"step 1: the gradient is not finite, first at inner\.weight;"):
        train(model, counting(), RECIPE, loss=LOSS)
    assert all(torch.equal(each, before[name]) for name, each in weights(model).items())


def test_the_log_has_a_line_a_step_and_the_held_out_loss(tmp_path: Path) -> None:
    model = Bag()
    modes = list[bool]()

    def look() -> float:
        modes.append(model.training)
        return 1.5

    train(model, counting(), with_changes(steps=6, eval_every=3), loss=LOSS, folder=tmp_path / "run", evaluate=look)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.get("held_out") for line in lines] == [None, None, 1.5, None, None, 1.5]
    assert {"loss", "lr", "grad_norm", "tokens_per_second"} <= set(lines[0])
    assert modes == [False, False]
    assert not model.training


def test_the_generators_of_the_caller_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    train(Bag(dropout=0.5), counting(), with_changes(steps=2), loss=LOSS)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_sigterm_saves_the_step_and_the_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    undisturbed = Bag(dropout=0.2)
    train(undisturbed, counting(), RECIPE, loss=LOSS)

    def stop(entry: Entry) -> None:
        if entry.step == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step 14 of 30; its state is in .*--resume"):
        train(Bag(dropout=0.2), counting(), RECIPE, loss=LOSS, folder=tmp_path / "run", report=stop)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert state_file.latest(tmp_path / "run") == 14
    # another start is overwritten by the state
    model = Bag(seed=9, dropout=0.2)
    run = train(model, counting(), RECIPE, loss=LOSS, folder=tmp_path / "run", resume=True)
    assert len(run.losses) == 16
    assert all(map(torch.equal, model.parameters(), undisturbed.parameters()))


def test_the_log_of_a_killed_run_is_cut_back_to_its_state(tmp_path: Path) -> None:
    train(Bag(), counting(), with_changes(steps=10), loss=LOSS, folder=tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"step": 11, "loss": 1.0}\n{"step": 12, "lo')
    (tmp_path / "run" / ".step-00000020.partial-1-aa").mkdir()
    train(Bag(), counting(), with_changes(steps=10), loss=LOSS, folder=tmp_path / "run", resume=True)
    assert log.read_text() == whole
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "step-00000010"]


def test_another_recipe_or_text_is_refused_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder, settings={"text": "a"})
    with pytest.raises(UsageError, match=r"lr was 0.01, now 0.5; text was a, now b\. Give"):
        train(Bag(), counting(), with_changes(lr=0.5), loss=LOSS, folder=folder, resume=True, settings={"text": "b"})
    # how often it looks and saves moves no weight
    again = with_changes(save_every=7, eval_every=2)
    train(Bag(), counting(), again, loss=LOSS, folder=folder, resume=True, settings={"text": "a"})


def test_a_state_is_not_overwritten_and_a_missing_or_damaged_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match="no state of a run there"):
        train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder, resume=True)
    train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder)
    with pytest.raises(UsageError, match="holds the state of a run at step 30"):
        train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder)
    model = Bag()
    select(model, ["inner.*"])
    with pytest.raises(CheckpointError, match="of other parameters"):
        train(model, counting(), RECIPE, loss=LOSS, folder=folder, resume=True)
    tensors = folder / "step-00000030" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="the state is damaged"):
        train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder, resume=True)


def test_a_full_disk_leaves_the_last_state_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = state_file.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def fill(entry: Entry) -> None:
        if entry.step == 12:
            monkeypatch.setattr(state_file, "save_file", full)

    folder = tmp_path / "run"
    with pytest.raises(SaveError, match=r"step 20: .*No space left.*the state of step 10 is whole"):
        train(Bag(), counting(), RECIPE, loss=LOSS, folder=folder, report=fill)
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "step-00000010"]
    monkeypatch.setattr(state_file, "save_file", save)
    model, undisturbed = Bag(), Bag()
    train(model, counting(), RECIPE, loss=LOSS, folder=folder, resume=True)
    train(undisturbed, counting(), RECIPE, loss=LOSS)
    assert all(map(torch.equal, model.parameters(), undisturbed.parameters()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "--steps 0: expected 1 or more"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": math.nan}, "--lr nan: expected a number above 0"),
        ({"lr": -1.0}, "--lr -1"),
        ({"clip": 0.0}, "--clip 0"),
        ({"floor": 1.5}, "--floor 1.5"),
        ({"beta2": 1.0}, "--beta2 1"),
        ({"save_every": -1}, "--save-every -1"),
        ({"batch": 4, "accumulate": 3}, "4 windows cannot be read in 3 equal pieces"),
    ],
)
def test_bad_recipes(changes: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_changes(**changes)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="has 3 windows of 9 tokens, fewer than a batch of 4"):
        counting(windows=3)
    with pytest.raises(UsageError, match=r"no parameter is called 'iner\.weight'.*'inner\.weight'"):
        select(Bag(), ["iner.weight"])
    with pytest.raises(UsageError, match="no parameter is left to train"):
        train(Bag().requires_grad_(False), counting(), RECIPE, loss=LOSS)
    with pytest.raises(UsageError, match="Bag has no gradient checkpointing"):
        train(Bag(), counting(), with_changes(gradient_checkpointing=True), loss=LOSS)
    with pytest.raises(UsageError, match="only a run with a folder"):
        train(Bag(), counting(), RECIPE, loss=LOSS, resume=True)
    with pytest.raises(UsageError, match="the batch of step 1 has 3 windows; the recipe says 4"):
        train(Bag(), counting(batch=3), RECIPE, loss=LOSS)
    for changes in ({"weight": 1.5}, {"temperature": 0.0}, {"hidden": -1.0}):
        with pytest.raises(UsageError, match="expected"):
            Distillation(teacher=Bag(), **changes)
    for share in (0.0, 1.0, -1.0, math.nan, 1e-9):
        with pytest.raises(UsageError, match="--held-out"):
            split("some text", share)
    assert split("0123456789", 0.2) == ("01234567", "89")
