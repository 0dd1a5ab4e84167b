"""Narrower feed-forwards: which channels go, what that costs, and what least squares makes up for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import deepen
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.tiny import output_of, tiny_inputs, tiny_model
from deepen.errors import FamilyError, ProgramError, UsageError
from deepen.surgery.activations import Activations
from deepen.surgery.narrow import Fit, kept_channels
from tests.cli.models import TEXT, tokenizer
from tests.surgery.cases import layer, off, outputs

FAMILIES = ("llama", "gpt2", "qwen3", "starcoder2")
WRONG: Any = "wandas"


def with_tokenizer(folder: Path, family: str, plant: Any = lambda model: None) -> Checkpoint:
    model = tiny_model(family)
    with torch.no_grad():
        plant(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return deepen.open(folder)


def read(ck: Checkpoint, **options: Any) -> Activations:
    return deepen.activations(ck, TEXT, context=32, tokens=640, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return with_tokenizer(tmp_path_factory.mktemp("narrow") / "llama", "llama")


@pytest.fixture(scope="module")
def streams(llama: Checkpoint) -> Activations:
    return read(llama, products=True, gradients=True)


def quiet_channels(model: PreTrainedModel) -> None:
    """Every third hidden channel of every layer is zero on every input, and is written with large weights."""
    for index in range(6):
        part: Any = layer(model, index).mlp
        if hasattr(part, "gate_proj"):
            part.gate_proj.weight[::3] = 0
            part.down_proj.weight[:, ::3] = 9
        else:
            part.c_fc.weight[:, ::3] = 0
            part.c_fc.bias[::3] = 0
            part.c_proj.weight[::3] = 9


@pytest.mark.method("narrow")
@pytest.mark.parametrize("score", ["energy", "taylor"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_channels_that_are_never_active_cost_nothing(family: str, score: Any, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family, quiet_channels)
    known = read(ck, gradients=score == "taylor")
    small, told = deepen.narrow(ck, known, keep=2 / 3, score=score, multiple=1)
    assert told.figures["kept"] == pytest.approx(2 / 3, abs=0.01)
    assert off(outputs(small), outputs(ck)) < 1e-5
    other, _ = deepen.narrow(ck, known, keep=2 / 3, score="magnitude", multiple=1)
    assert off(outputs(other), outputs(ck)) > 1e-3


@pytest.mark.parametrize("score", ["wanda", "magnitude", "energy", "taylor"])
def test_the_order_of_the_channels_does_not_matter(llama: Checkpoint, score: Any, tmp_path: Path) -> None:
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))

    def shuffle(model: PreTrainedModel) -> None:
        for index in range(6):
            part: Any = layer(model, index).mlp
            for matrix in (part.gate_proj, part.up_proj):
                matrix.weight.copy_(matrix.weight[order].clone())
            part.down_proj.weight.copy_(part.down_proj.weight[:, order].clone())

    shuffled = with_tokenizer(tmp_path / "shuffled", "llama", shuffle)
    results = [
        outputs(deepen.narrow(ck, read(ck, products=True, gradients=True), keep=0.5, score=score, multiple=8,
                              compensate=True)[0])
        for ck in (llama, shuffled)
    ]  # fmt: skip
    assert off(*results) < 1e-4
    assert off(results[0], outputs(llama)) > 1e-2


def test_the_scores_are_their_formulas(llama: Checkpoint, streams: Activations) -> None:
    from deepen.checkpoint.widths import bank_modules, feed_forward
    from deepen.surgery.narrow import channel_scores

    tower = llama.family.tower("")
    shape = feed_forward(bank_modules(llama, tower)[2], tower.parts, "")
    stem = "model.layers.2.mlp"
    up, gate, down = (llama.source.read(f"{stem}.{name}_proj.weight").double() for name in ("up", "gate", "down"))
    # What the feed-forward reads and its hidden values, from the modules themselves.
    kept: dict[str, torch.Tensor] = {}
    model: Any = llama.load()
    part = model.model.layers._modules["2"].mlp
    part.up_proj.register_forward_pre_hook(lambda module, args: kept.update(read=args[0].double().flatten(0, 1)))

    def hidden(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        args[0].retain_grad()
        kept["hidden"] = args[0]

    part.down_proj.register_forward_pre_hook(hidden)
    ids = torch.tensor(llama.tokenizer()(TEXT, add_special_tokens=False).input_ids)[:640].view(-1, 32)
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").backward()
    slope: Any = kept["hidden"].grad
    active = kept["hidden"].detach().double().flatten(0, 1)
    effect = (active * slope.double().flatten(0, 1)).abs().mean(0)
    root, inner = kept["read"].square().mean(0).sqrt(), active.square().mean(0)
    expected = {
        "magnitude": up.norm(dim=1) + gate.norm(dim=1) + down.norm(dim=0),
        "wanda": (up * root).norm(dim=1) + (gate * root).norm(dim=1) + down.norm(dim=0) * inner.sqrt(),
        "energy": inner * down.square().sum(0),
        "taylor": effect,
    }
    for score, value in expected.items():
        assert off(channel_scores(llama, tower, 2, shape, score, streams) / value.max(), value / value.max()) < 1e-5


def test_the_least_channels_may_stay() -> None:
    scores = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 0.0, 9.0, 8.0, 7.0, 6.0])
    assert kept_channels(scores, 5).tolist() == [0, 6, 7, 8, 9]
    assert kept_channels(scores, 5, least=0.2).tolist() == [1, 5, 6, 7, 8]
    assert kept_channels(scores, 10, least=0.2).tolist() == list(range(10))


def test_a_fit_is_never_worse_than_slicing_and_exact_where_it_can_be() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(400, 12, dtype=torch.float64) + 1
    matrix, kept = torch.randn(5, 12, dtype=torch.float64), torch.arange(8)
    gram, mean = hidden.T @ hidden / 400, hidden.mean(0)
    for centre in (None, mean):
        errors = [Fit(gram, centre, kept, ridge).error(matrix, Fit(gram, centre, kept, ridge).weight(matrix))
                  for ridge in (0.0, 1e-2, 1.0, 100.0, 1e12)]  # fmt: skip
        assert errors == sorted(errors)
        assert errors[0] < errors[-1]
        assert errors[-1] == pytest.approx(Fit(gram, centre, kept, 1.0).error(matrix, matrix[:, kept]), rel=1e-6)
    # Channels that go are sums of those that stay, and a constant that only the bias can hold.
    hidden[:, 8:] = hidden[:, :4] * 2 + hidden[:, 4:8] + 3
    fit = Fit(hidden.T @ hidden / 400, hidden.mean(0), kept, 0.0)
    written = hidden[:, kept] @ fit.weight(matrix).T + fit.shift(matrix)
    assert torch.allclose(written, hidden @ matrix.T, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_compensation_is_nearer_on_the_text_it_was_fitted_to(family: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    known = read(ck, products=True)
    keep = {2: 0.5}
    model: Any = ck.load()
    ids = torch.tensor(ck.tokenizer()(TEXT, add_special_tokens=False).input_ids)[:640].view(-1, 32)
    wrote: list[torch.Tensor] = []
    for made in (
        ck,
        deepen.narrow(ck, known, keep=keep, multiple=8)[0],
        deepen.narrow(ck, known, keep=keep, multiple=8, compensate=True)[0],
    ):
        model = made.load()
        entry: Any = layer(model, 2)
        entry.layer.mlp.register_forward_hook(lambda module, args, out: wrote.append(out.double()))
        with torch.no_grad():
            model(input_ids=ids)
    apart = [(each - wrote[0]).square().mean() for each in wrote[1:]]
    assert apart[1] < 0.9 * apart[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_width_is_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    whole = deepen.narrow(ck, read(ck), keep=1.0)[0]
    assert torch.equal(outputs(whole), outputs(ck))
    small, told = deepen.narrow(ck.apply("0-3 5"), read(ck.apply("0-3 5")), keep=0.5, multiple=8)
    assert told.before == told.after == "0-3 5"
    saved = small.save(tmp_path / "small")
    assert saved.form == "plain"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(output_of(model, tiny_inputs(model, tokens=16)), outputs(small))
    assert small.cost().params == sum(each.numel() for each in model.parameters())
    assert small.cost().flops < ck.apply("0-3 5").cost().flops
    # The layer that was not visited is as wide as it was, and may come back.
    back = small.apply("0-5")
    assert back.save(tmp_path / "back").form == "native"
    assert torch.equal(outputs(deepen.open(tmp_path / "back")), outputs(back))


def test_several_widths_are_saved_in_the_native_form(llama: Checkpoint, streams: Activations, tmp_path: Path) -> None:
    small, _ = deepen.narrow(llama, streams, keep={1: 0.5, 4: 0.75}, multiple=8)
    assert small.widths == {"text": {1: 24, 4: 32}}
    assert small.save(tmp_path / "small").form == "native"
    again = deepen.open(tmp_path / "small")
    assert torch.equal(outputs(again), outputs(small))
    assert again.cost().params == small.cost().params < llama.cost().params
    assert off(outputs(small), outputs(llama)) > 1e-3


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda ck, a: deepen.narrow(ck, a, keep=0), UsageError, "keep a share of 0; expected above 0"),
        (lambda ck, a: deepen.narrow(ck, a, keep={9: 0.5}), ProgramError, "layer 9 does not exist"),
        (lambda ck, a: deepen.narrow(ck.apply("0-3"), None, keep={4: 0.5}, score="magnitude"), UsageError,
         "layer 4 is not visited"),
        (lambda ck, a: deepen.narrow(ck, a, multiple=64), UsageError, "a multiple of 64 does not fit a width of 48"),
        (lambda ck, a: deepen.narrow(ck, a, score=WRONG, multiple=8), UsageError, "did you mean 'wanda'"),
        (lambda ck, a: deepen.narrow(ck, multiple=8), UsageError, "the score wanda needs activations"),
        (lambda ck, a: deepen.narrow(ck.apply("0-3"), a, multiple=8), UsageError, "in `0-5`, not of .* in `0-3`"),
        (lambda ck, a: deepen.narrow(ck, replace(a, grams={}), multiple=8, compensate=True), UsageError,
         "products=True"),
        (lambda ck, a: deepen.narrow(ck, replace(a, effects={}), multiple=8, score="taylor"), UsageError,
         "gradients=True"),
        (lambda ck, a: deepen.narrow(ck, a, multiple=8, ridge=-1), UsageError, "the ridge is 0 or more"),
        (lambda ck, a: deepen.narrow(ck, a, multiple=8, least=1), UsageError, "share of least channels"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    llama: Checkpoint, streams: Activations, call: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        call(llama, streams)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_moe", "writes with .* tensors"), ("phi3", "it has 0 input matrices"), ("mamba", "part 'f' of a Mamba")],
)
def test_other_feed_forwards_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    ck = with_tokenizer(tmp_path / family, family)
    with pytest.raises(FamilyError, match=reason):
        deepen.narrow(ck, score="magnitude", multiple=8)
