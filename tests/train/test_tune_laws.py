"""The laws of every method that trains a selection, over a looped model of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepen
from deepen.checkpoint.tiny import output_of, tiny_checkpoint
from deepen.errors import UsageError
from deepen.registry import methods
from deepen.train.loop import seeded, train
from deepen.train.losses import CrossEntropy
from deepen.train.optim import adamw, trained
from deepen.train.recipe import Recipe
from deepen.train.select import add_lora, select, select_layers
from deepen.train.selective.block import Block
from deepen.train.selective.entries import entries
from deepen.train.selective.fisher import fisher_layers
from deepen.train.selective.languages import differing_layers, feed_forward_selection
from deepen.train.selective.matrices import feed_forwards, matrices, sides
from deepen.train.selective.selection import Selection
from deepen.train.selective.slices import slices
from deepen.train.selective.subnets import subnets, subnets_pro
from tests.train.text_model import weights

LOOP = "0-1 (2-3)*2 4-5"
LOSS = CrossEntropy()
RECIPE = Recipe(steps=7, batch=4, lr=1e-2, warmup=0, eval_every=0, save_every=3, weight_decay=0.5)
# The families: one with a gated feed-forward, and one whose matrices are turned, with biases and a tied head.
FAMILIES = ("llama", "gpt2")
WINDOWS = torch.randint(4, 90, (16, 12), generator=torch.Generator().manual_seed(7))


def batches(step: int) -> torch.Tensor:
    return WINDOWS[torch.arange(4 * step, 4 * step + 4) % len(WINDOWS)]


def some(model: Any, tower: str) -> list[str]:
    """The matrices of the first layer and of one that is visited twice."""
    return matrices(model, tower, [0, 2])


def per_layer(model: Any, tower: str, layers: tuple[int, ...] = (0, 2)) -> list[list[str]]:
    return [matrices(model, tower, [layer]) for layer in layers]


def up(model: Any, tower: str, layers: tuple[int, ...] = ()) -> list[str]:
    return [first[-1] for first, _ in feed_forwards(model, tower, layers)]


def with_biases(model: nn.Module, names: list[str]) -> list[str]:
    known = dict(model.named_parameters())
    return names + [name for each in names if (name := each.removesuffix("weight") + "bias") in known]


def fim(model: Any, tower: str, count: int) -> None:
    select_layers(model, fisher_layers(model, WINDOWS[:3], tower, count)[0], tower)


def slam(model: Any, tower: str, layers: tuple[int, ...], gate: bool = False) -> Selection:
    if not layers:
        layers, _ = differing_layers(model, (WINDOWS[:4], WINDOWS[4:].flip(1)), tower, 2)
    return feed_forward_selection(model, tower, layers, gate=gate)


@dataclass(frozen=True)
class Case:
    """How a method selects a little, and everything it can select.

    Attributes:
        little: selects; gives the selection, None where whole parameters are trained.
        everything: the same of all it can train.
        reach: the names of the parameters that `everything` trains.
    """

    little: Callable[[Any, str], Selection | None]
    everything: Callable[[Any, str], Selection | None]
    reach: Callable[[Any, str], list[str]]


def layer_names(model: Any, tower: str) -> list[str]:
    heads = (".layers.", ".h.")
    return [name for name, _ in model.named_parameters() if any(head in name for head in heads)]


CASES = {
    "fim": Case(lambda m, t: fim(m, t, 2), lambda m, t: fim(m, t, 6), layer_names),
    "slicefine": Case(
        lambda m, t: slices(m, some(m, t), width=3, every=2, order="alternating"),
        lambda m, t: slices(m, matrices(m, t), width=1000, every=2),
        matrices,
    ),
    "losia": Case(
        lambda m, t: subnets(m, per_layer(m, t), share=0.25, every=2),
        lambda m, t: subnets(m, per_layer(m, t, tuple(range(6))), share=1.0, every=100),
        matrices,
    ),
    "losia-pro": Case(
        lambda m, t: subnets_pro(m, per_layer(m, t), share=0.25, every=2),
        lambda m, t: subnets_pro(m, per_layer(m, t, tuple(range(6))), share=1.0, every=100),
        matrices,
    ),
    "slam": Case(
        lambda m, t: slam(m, t, ()),
        lambda m, t: slam(m, t, tuple(range(6)), gate=True),
        lambda m, t: [name for first, last in feed_forwards(m, t) for name in (*first, last)],
    ),
    "spu": Case(
        lambda m, t: entries(m, WINDOWS, t, (0, 2), share=0.1),
        lambda m, t: entries(m, WINDOWS, t, share=1.0),
        lambda m, t: with_biases(m, up(m, t)),
    ),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, deepen.Checkpoint]:
    place = tmp_path_factory.mktemp("tune")
    found = {}
    for family in FAMILIES:
        tiny_checkpoint(place / family, family)
        found[family] = deepen.open(place / family).apply(LOOP)
    return found


def load(ck: deepen.Checkpoint) -> tuple[Any, str]:
    return ck.load(dtype="float32"), ck.family.tower("").name


def of_files(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights by the names in the files, without trained parts."""
    found = {name.replace(".base_layer.", "."): each for name, each in weights(model).items()}
    return {name: each for name, each in found.items() if not name.endswith(".part")}


def run(model: Any, selection: Selection | None, recipe: Recipe = RECIPE, **more: Any) -> Any:
    return train(model, batches, recipe, loss=LOSS, selection=selection, **more)


def test_every_method_of_the_family_is_here() -> None:
    # inflection is LoRA in chosen layers, whose laws are those of LoRA
    assert {found.name for found in methods("tune")} == {*CASES, "inflection"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_everything_selected_is_full_fine_tuning_bit_for_bit(
    opened: dict[str, deepen.Checkpoint], family: str, name: str
) -> None:
    case = CASES[name]
    mine, tower = load(opened[family])
    plain, _ = load(opened[family])
    names = case.reach(plain, tower)
    selection = case.everything(mine, tower)
    run(mine, selection)
    select(plain, names)
    run(plain, None)
    start, _ = load(opened[family])
    assert all(torch.equal(of_files(mine)[each], weight) for each, weight in weights(plain).items())
    assert all(not torch.equal(weights(plain)[each], weights(start)[each]) for each in names)


@pytest.mark.parametrize("name", CASES)
def test_nothing_outside_the_selection_moves_in_a_hundred_steps(
    opened: dict[str, deepen.Checkpoint], name: str
) -> None:
    model, tower = load(opened["gpt2"])
    selection = CASES[name].little(model, tower)
    before = of_files(model)
    allowed = {each: torch.zeros_like(weight, dtype=torch.bool) for each, weight in before.items()}
    for each in trained(model):
        if not each.endswith(".part"):
            allowed[each.replace(".base_layer.", ".")][:] = True
    parts = {} if selection is None else selection.parts

    def note(_: object = None) -> None:
        for each, sliced in parts.items():
            sliced.block.put(allowed[each], torch.ones_like(sliced.part, dtype=torch.bool), sliced.turned)

    note()
    stays = []

    def look(entry: object) -> None:
        now = of_files(model)
        stays.append(all(torch.equal(now[each][~allowed[each]], before[each][~allowed[each]]) for each in before))
        # blocks move at the end of a step, so what has moved since may be trained in the next
        note()

    run(model, selection, Recipe(**{**vars(RECIPE), "steps": 100}), report=look)
    assert all(stays)
    now = of_files(model)
    assert any(not torch.equal(now[each], before[each]) for each in before)
    frozen = [each for each, mask in allowed.items() if not mask.any()]
    assert frozen
    assert all(torch.equal(now[each], before[each]) for each in frozen)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_same_again_and_in_pieces(opened: dict[str, deepen.Checkpoint], name: str) -> None:
    ends = []
    for pieces in (1, 1, 2):
        model, tower = load(opened["llama"])
        selection = CASES[name].little(model, tower)
        run(model, selection, Recipe(**{**vars(RECIPE), "accumulate": pieces, "eps": 1e-4}))
        blocks = {} if selection is None else {at: each.block for at, each in selection.parts.items()}
        ends.append((of_files(model), blocks))
    (first, at), (second, again), (third, split) = ends
    assert all(torch.equal(first[each], second[each]) for each in first)
    assert all(at[each].same(again[each]) and at[each].same(split[each]) for each in at)
    assert max((first[each] - third[each]).abs().max().item() for each in first) < 1e-4


def formula(name: str, model: Any, tower: str) -> int:
    """The numbers that `little` trains at the first step, from the shapes alone."""
    shapes = [sides(model, each) for each in some(model, tower)]
    if name == "slicefine":
        return sum(3 * rows for rows, _ in shapes)
    if name.startswith("losia"):
        return sum((rows // 4) * (columns // 4) for rows, columns in shapes)
    if name == "spu":
        return sum(
            int(0.1 * rows * columns) for rows, columns in (sides(model, each) for each in up(model, tower, (0, 2)))
        )
    if name == "slam":
        (first, last), *_ = feed_forwards(model, tower)
        return 2 * sum(rows * columns for rows, columns in (sides(model, each) for each in (first[-1], last)))
    return 2 * sum(each.numel() for at, each in model.named_parameters() if ".layers.0." in at)


@pytest.mark.parametrize("name", CASES)
def test_numbers_trained_and_moments_are_the_formula(opened: dict[str, deepen.Checkpoint], name: str) -> None:
    model, tower = load(opened["llama"])
    expected = formula(name, model, tower)
    CASES[name].little(model, tower)
    assert sum(each.numel() for each in trained(model).values()) == expected
    optimiser = adamw(model, RECIPE)
    LOSS(model, batches(0)).backward()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in trained(model).values())
    optimiser.step()
    held = [each for state in optimiser.state.values() for kind, each in state.items() if kind != "step"]
    assert sum(each.numel() * each.element_size() for each in held) == 2 * 4 * expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_a_released_model_is_the_trained_one(opened: dict[str, deepen.Checkpoint], family: str, name: str) -> None:
    model, tower = load(opened[family])
    kinds = {path: type(module) for path, module in model.named_modules()}
    names = list(weights(model))
    selection = CASES[name].little(model, tower)
    inputs = {"input_ids": batches(0)}
    untrained = output_of(model, inputs)
    run(model, selection)
    before = output_of(model, inputs)
    assert not torch.equal(before, untrained)
    if selection is not None:
        selection.release()
    assert torch.equal(output_of(model, inputs), before)
    assert {path: type(module) for path, module in model.named_modules()} == kinds
    assert list(weights(model)) == names


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    opened: dict[str, deepen.Checkpoint], name: str, tmp_path: Path
) -> None:
    """States are read by a model of other weights, at a step inside a window and away from the first place."""

    class Enough(Exception):
        pass

    def stop(entry: Any) -> None:
        if entry.step == 5:
            raise Enough

    model, tower = load(opened["gpt2"])
    with pytest.raises(Enough):
        run(model, CASES[name].little(model, tower), folder=tmp_path / "run", report=stop)
    resumed, _ = load(opened["gpt2"])
    selection = CASES[name].little(resumed, tower)
    assert len(run(resumed, selection, folder=tmp_path / "run", resume=True).losses) == 4
    whole, _ = load(opened["gpt2"])
    run(whole, CASES[name].little(whole, tower))
    mine, theirs = of_files(resumed), of_files(whole)
    assert all(torch.equal(mine[each], theirs[each]) for each in theirs)
    document = json.loads((tmp_path / "run" / "step-00000007" / "state.json").read_text(encoding="utf-8"))
    assert document["step"] == 7


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("fim", "slam")])
def test_gradients_of_a_layer_visited_twice_are_sums(opened: dict[str, deepen.Checkpoint], name: str) -> None:
    """The part's gradient is the block of the gradient that plain autograd gives for the shared matrix."""
    model, tower = load(opened["gpt2"])
    plain, _ = load(opened["gpt2"])
    selection = CASES[name].little(model, tower)
    assert selection is not None
    selection.before(0)
    for each in (model, plain):
        LOSS(each, batches(0)).backward()
    for each, sliced in selection.parts.items():
        grad = plain.get_parameter(each).grad
        assert grad is not None
        assert sliced.part.grad is not None
        expected = sliced.block.take(grad, sliced.turned)
        assert (sliced.part.grad - expected).abs().max() <= 1e-5 * grad.abs().max()
    biases = [each for each, _ in model.named_parameters() if each.endswith("bias") and each in trained(model)]
    assert bool(biases) == (name == "spu")
    for each in biases:
        theirs = plain.get_parameter(each.replace(".base_layer.", ".")).grad
        mine = model.get_parameter(each).grad
        assert theirs is not None
        assert mine is not None
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_a_tied_embedding_counts_once_and_has_no_blocks(opened: dict[str, deepen.Checkpoint]) -> None:
    model, _ = load(opened["gpt2"])
    assert model.lm_head.weight is model.transformer.wte.weight
    count = sum(each.numel() for each in model.parameters())
    Selection(model, {each: Block() for each in weights(model)})
    assert sum(each.numel() for each in trained(model).values()) == count
    with pytest.raises(UsageError, match="is not the matrix of a linear layer"):
        Selection(model, {"transformer.wte.weight": Block(columns=torch.tensor([1]))})


def test_an_empty_selection_trains_nothing_and_is_refused(opened: dict[str, deepen.Checkpoint]) -> None:
    model, _ = load(opened["llama"])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(UsageError, match="no parameter is left to train"):
        run(model, Selection(model, {}))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.method("inflection")
def test_lora_in_a_band_has_parameters_there_only_and_merges(opened: dict[str, deepen.Checkpoint]) -> None:
    model, tower = load(opened["llama"])
    inputs = {"input_ids": batches(0)}
    before = output_of(model, inputs)
    with seeded(0):
        adapters = add_lora(model, 2, tower, (2, 3))
    assert torch.equal(output_of(model, inputs), before)
    assert {name.split(".layers.")[1][0] for name in trained(model)} == {"2", "3"}
    LOSS(model, batches(0)).backward()
    for name, each in trained(model).items():
        assert each.grad is not None
        assert bool(each.grad.any()) == (".lora_B." in name)
    run(model, None)
    apart = output_of(model, inputs)
    adapters.merge_and_unload()
    assert (output_of(model, inputs) - apart).abs().max() < 1e-5 * max(1.0, apart.abs().max().item())
