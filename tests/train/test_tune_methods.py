"""What distinguishes each method of selective fine-tuning, and mistakes that published code makes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepen
from deepen.checkpoint.tiny import tiny_checkpoint
from deepen.errors import UsageError
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.recipe import Recipe
from deepen.train.selective.block import Block
from deepen.train.selective.entries import entries
from deepen.train.selective.fisher import fisher, fisher_layers
from deepen.train.selective.inflection import band_of, indices, inflection_layers
from deepen.train.selective.languages import differing_layers, feed_forward_selection
from deepen.train.selective.matrices import feed_forwards, matrices
from deepen.train.selective.selection import Selection
from deepen.train.selective.slices import slices
from deepen.train.selective.subnets import Windows, localise, subnets, subnets_pro
from tests.cli.models import TEXT, checkpoint
from tests.train.text_model import Bag, counting, weights

WINDOWS = torch.randint(4, 90, (8, 12), generator=torch.Generator().manual_seed(7))
RECIPE = Recipe(steps=6, batch=4, lr=1e-2, warmup=0, eval_every=0, weight_decay=0.0, clip=1e9)


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    tiny_checkpoint(tmp_path / "llama", "llama")
    return deepen.open(tmp_path / "llama").load(dtype="float32")


def tower_of(model: Any) -> str:
    from deepen.checkpoint.visit import VisitList

    return next(each for each in model.modules() if isinstance(each, VisitList)).tower.name


@pytest.mark.method("fim")
def test_squares_are_of_each_example() -> None:
    """Two examples that pull in opposite directions have a mean gradient of 0, and still inform."""
    line = nn.Linear(1, 1, bias=False)
    examples = torch.tensor([[[1.0]], [[-1.0]]])
    found = fisher([line.weight], line, examples[:, 0], lambda x: line(x).sum())
    assert line(examples[:, 0]).sum() == 0
    assert found[line.weight].item() == 1.0


@pytest.mark.method("fim")
def test_the_information_of_a_logistic_regression() -> None:
    """With labels of the model it is the diagonal of X^T diag(p (1 - p)) X / n, here over both labels by their odds."""
    generator = torch.Generator().manual_seed(0)
    line, x = nn.Linear(3, 1, bias=False), torch.randn(4000, 3, generator=generator)
    p = torch.sigmoid(line(x)).detach()
    drawn = torch.bernoulli(p, generator=generator)

    def loss(example: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(line(example[:, :3]), example[:, 3:], reduction="sum")

    found = fisher([line.weight], line, torch.cat([x, drawn], 1), loss)[line.weight][0]
    expected = (p * (1 - p) * x.square()).mean(0)
    assert torch.allclose(found, expected, rtol=0.1)


@pytest.mark.method("fim")
def test_the_layer_that_reaches_the_loss_comes_first(llama: Any) -> None:
    """The output matrices of all layers but one are 0, so that only its weights inform much."""
    with torch.no_grad():
        for layer in (0, 1, 3, 4, 5):
            llama.get_parameter(f"model.layers.{layer}.mlp.down_proj.weight").zero_()
            llama.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight").zero_()
            llama.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight").zero_()
            llama.get_parameter(f"model.layers.{layer}.self_attn.v_proj.weight").zero_()
    flags = {name: each.requires_grad for name, each in llama.named_parameters()}
    for labels in ("true", "model"):
        chosen, scores = fisher_layers(llama, WINDOWS[:4], tower_of(llama), 1, labels=labels)
        assert chosen == (2,)
        assert all(scores[layer] == 0 for layer in (0, 1, 3, 4, 5))
    assert {name: each.requires_grad for name, each in llama.named_parameters()} == flags
    assert all(each.grad is None for each in llama.parameters())


@pytest.mark.method("fim")
def test_a_score_by_hand_and_one_that_does_not_depend_on_scale(llama: Any) -> None:
    tower = tower_of(llama)
    chosen, scores = fisher_layers(llama, WINDOWS[:3], tower, 2, reduce="sum")
    total = 0.0
    for window in WINDOWS[:3]:
        llama.zero_grad()
        (11 * CrossEntropy()(llama, window[None])).backward()
        total += sum(each.grad.square().sum().item() for each in llama.model.layers[1].parameters()) / 3
    assert scores[1] == pytest.approx(total, rel=1e-4)
    assert chosen == tuple(sorted(sorted(scores, key=lambda layer: -scores[layer])[:2]))
    weighed = fisher_layers(llama, WINDOWS[:3], tower, 2, reduce="sum", weigh=True)[1]
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight.mul_(4)
        llama.model.layers[1].mlp.down_proj.weight.div_(4)
    assert fisher_layers(llama, WINDOWS[:3], tower, 2, reduce="sum", weigh=True)[1] == pytest.approx(weighed, rel=1e-3)
    assert fisher_layers(llama, WINDOWS[:3], tower, 2, reduce="sum")[1][1] != pytest.approx(scores[1], rel=0.1)


@pytest.mark.method("inflection")
def test_narrow_attention_that_writes_little_is_the_band(tmp_path: Path) -> None:
    """Layer 3 looks at single tokens and writes next to nothing, so no gradient is added on the way through it."""
    checkpoint(tmp_path / "model", bos=True)
    model = deepen.open(tmp_path / "model").load()
    with torch.no_grad():
        layer = model.model.layers[3]
        layer.self_attn.q_proj.weight.mul_(40)
        layer.self_attn.o_proj.weight.mul_(0.01)
        layer.mlp.down_proj.weight.mul_(0.01)
    model.save_pretrained(tmp_path / "planted")
    checkpoint(tmp_path / "other", bos=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "planted" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    found = inflection_layers(deepen.open(tmp_path / "planted"), TEXT, context=32, tokens=256)
    assert found.index.index(max(found.index)) == 3
    assert 3 in found.layers
    assert len(found.layers) <= 2
    assert found.entropy[3] == min(found.entropy)
    assert len(found.gradients) == 7
    assert found.decay > 1


@pytest.mark.method("inflection")
def test_the_index_does_not_depend_on_the_size_of_the_loss_and_the_band_is_one_run() -> None:
    entropy, gradients = (0.9, 0.2, 0.7, 0.5), (4.0, 3.0, 6.0, 2.0, 1.0)
    index = indices(entropy, gradients)
    assert index == pytest.approx(indices(entropy, tuple(100 * each for each in gradients)))
    assert index.index(max(index)) == 1
    assert band_of((0.0, 1.5, 2.0, 0.5, 1.2, 3.0)) == (4, 5)
    assert band_of((0.0, 0.5, 0.2)) == (1, 1)
    assert band_of((1.5, 1.6, 1.7, 1.1, 0.0, 0.0, 1.9, 0.0, 0.0)) == (6, 6)


def positions(order: Any, side: int, width: int, every: int, steps: int) -> list[tuple[str, list[int]]]:
    """The slice of the matrix [side, 6] of a model after each step."""
    model = nn.Sequential(nn.Linear(6, side))
    selection = slices(model, ["0.weight"], width=width, order=order, every=every, seed=1)
    optimiser = torch.optim.AdamW(list(selection.parts["0.weight"].parameters()))
    found = []
    for step in range(steps):
        ((kind, indices),) = selection.parts["0.weight"].block.tensors().items()
        found.append((kind, indices.tolist()))
        selection.after(step, optimiser)
    return found


@pytest.mark.method("slicefine")
def test_slices_sweep_every_column_once() -> None:
    moves = positions("columns", 5, 4, 2, 8)
    assert (
        moves
        == [("columns", [0, 1, 2, 3])] * 2
        + [("columns", [4, 5])] * 2
        + [("columns", [0, 1, 2, 3])] * 2
        + [("columns", [4, 5])] * 2
    )
    assert [indices for _, indices in positions("rows", 5, 2, 1, 4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert positions("alternating", 5, 3, 1, 5) == [
        ("columns", [0, 1, 2]), ("rows", [0, 1, 2]), ("columns", [3, 4, 5]), ("rows", [3, 4]), ("columns", [0, 1, 2]),
    ]  # fmt: skip
    drawn = positions("random", 5, 1, 1, 60)
    assert drawn == positions("random", 5, 1, 1, 60)
    assert {indices[0] for _, indices in drawn} == set(range(6))


@pytest.mark.method("slicefine")
def test_a_slice_that_is_left_keeps_its_values_and_a_new_one_starts_without_moments() -> None:
    model = Bag()
    selection = slices(model, ["inner.weight"], width=2, every=3)
    part, seen = selection.parts["inner.weight"].part, []

    def look(entry: Any) -> None:
        seen.append(model.inner.weight.detach().clone())

    start = model.inner.weight.detach().clone()
    recipe = Recipe(**{**vars(RECIPE), "steps": 9, "weight_decay": 0.3})
    train(model, counting(), recipe, loss=CrossEntropy(), selection=selection, report=look)
    assert [each.shape for each in (start, part)] == [(6, 6), (6, 2)]
    for step, now in enumerate(seen):
        before = start if step == 0 else seen[step - 1]
        moved = (now != before).any(0).nonzero().flatten().tolist()
        assert moved == [2 * (step // 3), 2 * (step // 3) + 1]
    # the first update of AdamW is of the size of the rate, whatever moments were before
    rate = recipe.lr_at(3)
    decayed = seen[2] * (1 - rate * 0.3)
    sizes = (seen[3] - decayed)[:, 2:4].abs()
    assert torch.allclose(sizes, torch.full_like(sizes, rate), rtol=0.01)


@pytest.mark.method("slicefine")
@pytest.mark.parametrize(("block", "kept"), [("columns", 2), ("rows", 6)])
def test_only_the_columns_trained_are_kept_for_the_backward_pass(block: str, kept: int) -> None:
    model = Bag()
    Selection(model, {"inner.weight": Block(**{block: torch.tensor([1, 4])})})
    x, saved = torch.randn(5, 6, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        model.inner(x).sum().backward()
    assert sorted(saved) == sorted([(5, kept), (6, 6)])
    assert x.grad is not None
    assert torch.allclose(x.grad, model.inner.weight.sum(0).expand(5, 6), atol=1e-6)


@pytest.mark.method("losia")
def test_localising_takes_the_best_of_three_rules() -> None:
    better = 0
    for seed in range(20):
        score = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed)).pow(4)

        def total(rows: Any, columns: Any, score: torch.Tensor = score) -> float:
            return score[list(rows)][:, list(columns)].sum().item()

        block = localise(score, 3, 3)
        assert block.rows is not None
        assert block.columns is not None
        found = total(block.rows.tolist(), block.columns.tolist())
        apart = total(score.sum(1).topk(3).indices.tolist(), score.sum(0).topk(3).indices.tolist())
        best = max(
            total(rows, score[list(rows)].sum(0).topk(3).indices.tolist())
            for rows in itertools.combinations(range(8), 3)
        )
        assert apart <= found + 1e-6
        assert found <= best + 1e-6
        better += found > apart + 1e-6
        # a sort whose result is dropped leaves them as they are ranked
        assert block.rows.tolist() == sorted(block.rows.tolist())
    assert better > 5


@pytest.mark.method("losia")
def test_windows_and_rates() -> None:
    windows = Windows([["a"], ["b"], ["c"]], {}, 2, False, True)
    assert [next(iter(windows.watched(step))) for step in range(8)] == list("aabbccaa")
    assert [windows.rate("a", step) for step in range(9)] == [1, 1, 0, 0.5, 1, 1, 1, 1, 0]
    assert [windows.rate("b", step) for step in range(6)] == [1, 1, 1, 1, 0, 0.5]
    together = Windows([["a"], ["b"], ["c"]], {}, 2, True, True)
    assert [sorted(together.watched(step)) for step in range(7)] == [["a", "b", "c"]] * 2 + [[]] * 4 + [["a", "b", "c"]]
    assert [together.rate("c", step) for step in range(4)] == [1, 1, 0, 0.5]


@pytest.mark.method("losia")
def test_importance_is_its_formula() -> None:
    windows = Windows([["w"]], {"w": (1, 1)}, 2, False, True)
    weight = torch.tensor([[2.0, -1.0], [0.5, 3.0]])
    mean = variation = torch.zeros(2, 2)
    for step in range(2):
        gradient = torch.tensor([[0.1, 0.4], [-2.0, 0.3]]) * (step + 1)
        sliced: Any = SimpleNamespace(weight=weight, gradient=gradient, turned=False)
        windows.look(step, {"w": sliced})
        change = (weight * gradient - 0.5 * (weight * gradient) ** 2).abs()
        mean = 0.85 * mean + 0.15 * change
        variation = 0.85 * variation + 0.15 * (change - mean).abs()
    state = windows.state()
    assert torch.allclose(state["mean/w"], mean)
    assert torch.allclose(state["variation/w"], variation)
    again = Windows([["w"]], {"w": (1, 1)}, 2, False, True)
    again.load(state)
    block = windows.moves(1)["w"]
    assert block.same(again.moves(1)["w"])
    assert (mean * variation)[block.rows, block.columns] == (mean * variation).max()
    assert windows.state() == {}


@pytest.mark.method("losia-pro")
def test_the_short_backward_pass_is_the_long_one(llama: Any, tmp_path: Path) -> None:
    other = deepen.open(tmp_path / "llama").load(dtype="float32")
    start = weights(llama)
    recipe = Recipe(**{**vars(RECIPE), "steps": 9, "eps": 1e-4})
    blocks = []
    for model, choose in ((llama, subnets_pro), (other, subnets)):
        groups = [matrices(model, tower_of(model), [layer]) for layer in (0, 3)]
        selection = choose(model, groups, share=0.25, every=2, seed=5)
        first = {name: each.block for name, each in selection.parts.items()}
        train(model, lambda _: WINDOWS[:4], recipe, loss=CrossEntropy(), selection=selection)
        assert not all(each.block.same(first[name]) for name, each in selection.parts.items())
        blocks.append({name: each.block for name, each in selection.parts.items()})
        selection.release()
    assert all(block.same(blocks[1][name]) for name, block in blocks[0].items())
    for name, each in weights(llama).items():
        assert (each - weights(other)[name]).abs().max() < 1e-4, name
        chosen = name.endswith("proj.weight") and (".layers.0." in name or ".layers.3." in name)
        assert torch.equal(each, start[name]) != chosen


@pytest.mark.method("losia-pro")
def test_after_a_localisation_adamw_begins_anew() -> None:
    """Moments and counter restart together, or the first update would be 3.16 times that of the rate."""
    model, rate = Bag(), 1e-3
    selection = subnets_pro(model, [["inner.weight"]], share=0.5, every=1)
    sliced = selection.parts["inner.weight"]
    optimiser = torch.optim.AdamW([sliced.part], lr=rate, weight_decay=0.0)
    for step in range(3):
        before, matrix = sliced.part.detach().clone(), sliced.weight.clone()
        optimiser.zero_grad()
        selection.before(step)
        CrossEntropy()(model, counting()(step)).backward()
        optimiser.step()
        sizes = (sliced.part.detach() - before).abs()
        assert torch.allclose(sizes, torch.full_like(sizes, rate), rtol=0.02)
        selection.after(step, optimiser)
        assert not optimiser.state
        # the rate of the step after a localisation is 0
        assert torch.equal(sliced.weight, matrix) == (step > 0)


@pytest.mark.method("losia-pro")
@pytest.mark.parametrize("watched", [False, True])
def test_the_gradient_of_a_bias_is_summed_over_tokens(watched: bool) -> None:
    model, plain = Bag(), Bag()
    selection = Selection(
        model, {"inner.weight": Block(rows=torch.tensor([0, 2]), columns=torch.tensor([1, 5])), "inner.bias": Block()}
    )
    selection.parts["inner.weight"].watched = watched
    for each in (model, plain):
        CrossEntropy()(each, counting()(0)).backward()
    mine, theirs = model.get_submodule("inner").base_layer.bias.grad, plain.inner.bias.grad
    assert theirs is not None
    assert torch.allclose(mine, theirs, atol=1e-7)
    whole = selection.parts["inner.weight"].gradient
    assert (whole is not None) == watched
    if whole is not None:
        assert torch.allclose(whole, plain.inner.weight.grad, atol=1e-7)


@pytest.mark.method("slam")
def test_neurons_that_know_one_language_only_make_their_layer_the_first(llama: Any) -> None:
    """Neurons of layer 1 are active for one token and never else; the other language has that token nowhere."""
    tower = tower_of(llama)
    one, other = WINDOWS.clone(), WINDOWS.clone()
    one[:, ::2], other[other == 5] = 5, 6
    with torch.no_grad():
        for layer in llama.model.layers:
            # nothing is written, so every layer reads the embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.gate_proj.weight.zero_()
        gate = llama.model.layers[1].mlp.gate_proj.weight
        table = llama.get_input_embeddings().weight
        table[5] = 100 * torch.ones_like(table[5]) * (torch.arange(len(table[5])) == 0)
        table[:5, 0] = table[6:, 0] = -1.0
        gate[:, 0] = 1.0
    chosen, scores = differing_layers(llama, (one, other), tower, 1)
    assert chosen == (1,)
    assert scores[1] > 0.01
    assert all(value == 0 for layer, value in scores.items() if layer != 1)
    assert all(value == 0 for value in differing_layers(llama, (one, one.flip(0)), tower, 1)[1].values())
    split = differing_layers(llama, (one, other), tower, 1, batch=3)[1]
    assert split == scores
    with pytest.raises(UsageError, match="give the texts of two or more"):
        differing_layers(llama, (one,), tower, 1)


@pytest.mark.method("slam")
def test_two_of_three_feed_forward_matrices_are_trained(llama: Any) -> None:
    selection = feed_forward_selection(llama, tower_of(llama), [2])
    assert not selection.parts
    trained = [name for name, each in llama.named_parameters() if each.requires_grad]
    assert trained == [f"model.layers.2.mlp.{name}_proj.weight" for name in ("up", "down")]
    feed_forward_selection(llama, tower_of(llama), [2], gate=True)
    assert sum(each.requires_grad for each in llama.parameters()) == 3


@pytest.mark.method("spu")
@pytest.mark.parametrize("signal", ["output", "loss"])
def test_the_entries_with_the_largest_gradients_are_chosen(llama: Any, signal: Any) -> None:
    tower = tower_of(llama)
    name = "model.layers.1.mlp.up_proj.weight"
    # a quarter of eight windows, which all entries have a gradient in
    logits = llama(input_ids=WINDOWS[:2]).logits
    value = logits[:, :-1].square().sum() if signal == "output" else CrossEntropy().of(logits, WINDOWS[:2])
    (grad,) = torch.autograd.grad(value, [llama.get_parameter(name)])
    selection = entries(llama, WINDOWS, tower, (1,), share=0.05, signal=signal)
    count = int(0.05 * grad.numel())
    assert selection.parts[name].block.entries is not None
    assert selection.parts[name].block.entries.tolist() == sorted(grad.abs().flatten().topk(count).indices.tolist())


@pytest.mark.method("spu")
def test_opposite_gradients_cancel_and_entries_without_one_are_left_out(llama: Any) -> None:
    tower = tower_of(llama)
    (first,) = [name for each, _ in feed_forwards(llama, tower, [1]) for name in each[1:]]
    with torch.no_grad():
        # half of the neurons are read by nobody
        llama.model.layers[1].mlp.down_proj.weight[:, ::2] = 0
    selection = entries(llama, WINDOWS, tower, (1,), share=0.5)
    chosen = selection.parts[first].block.entries
    assert chosen is not None
    width = selection.parts[first].weight.shape[1]
    assert set((chosen // width % 2).tolist()) == {1}
    selection.release()
    found = []
    for apart in (False, True):
        selection = entries(llama, WINDOWS, tower, (0, 1), share=0.1, apart=apart, across=True)
        found.append({name: each.block.entries.tolist() for name, each in selection.parts.items()})
        selection.release()
    assert found[0] != found[1]
    counts = [[len(each) for each in one.values()] for one in found]
    # of all matrices together, so that they do not share alike
    assert sum(counts[0]) == sum(counts[1])
    assert len(set(counts[0])) > 1


def test_blocks_that_do_not_fit_are_refused() -> None:
    model = Bag()
    for given, words in (
        ({"rows": torch.tensor([1, 0])}, "ascending order"),
        ({"rows": torch.tensor([], dtype=torch.int64)}, "one or more numbers"),
        ({"entries": torch.tensor([1]), "rows": torch.tensor([1])}, "give one of the two"),
    ):
        with pytest.raises(UsageError, match=words):
            Block(**given)
    with pytest.raises(UsageError, match=r"inner\.weight has 6 columns, and the block names number 6"):
        Selection(model, {"inner.weight": Block(columns=torch.tensor([2, 6]))})
    with pytest.raises(UsageError, match=r"'iner\.weight'.*did you mean 'inner\.weight'"):
        Selection(model, {"iner.weight": Block()})
    model.head = nn.Linear(6, 7, bias=False)
    model.head.weight = model.embed.weight
    with pytest.raises(UsageError, match=r"is shared with another module|is not the matrix"):
        Selection(model, {"embed.weight": Block(rows=torch.tensor([0]))})
    assert all(each.requires_grad for each in model.parameters())
    assert type(model.inner) is nn.Linear
    with pytest.raises(UsageError, match="expected one of columns, rows, alternating, random"):
        slices(model, ["inner.weight"], order="diagonal")  # pyright: ignore[reportArgumentType]
