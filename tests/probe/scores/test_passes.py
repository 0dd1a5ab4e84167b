"""Scores that run the model themselves, each against its own definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import deepen
from deepen.checkpoint.tiny import tiny_model
from deepen.errors import DataError
from deepen.probe.scores.attention import is_attention, spread
from deepen.probe.scores.effects import largest_change
from tests.cli.models import TEXT, tokenizer
from tests.probe.scores.planted import CONTEXT, planted

TEXT3 = TEXT[: 3 * CONTEXT]
PASSES = ("attention", "lens", "removal", "effects", "taylor", "magnitude")


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor(tokenizer()(text).input_ids).reshape(-1, CONTEXT)


@pytest.mark.method("removal")
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_removal_is_the_perplexity_of_the_program_without_it(tmp_path: Path, family: str) -> None:
    ck = planted(tmp_path / "model", family, bos=True)
    text = TEXT[:70]
    got = deepen.score(ck, "removal", text=text, context=CONTEXT, batch=2)

    def read(program: str) -> float:
        model = ck.apply(program).load()
        return deepen.perplexity(model, ck.tokenizer(), text, context=CONTEXT).perplexity

    base = read("0-5")
    for name, at, program in (
        ("removal", 2, "0-1 3-5"),
        ("removal", 5, "0-4"),
        ("removal.a", 0, "0.f 1-5"),
        ("removal.f", 3, "0-2 3.a 4-5"),
    ):
        expected = read(program)
        assert got.columns[f"{name}.perplexity"].values[at] == pytest.approx(expected, rel=1e-5)
        assert got.columns[name].values[at] == pytest.approx(math.log(expected / base), rel=1e-4, abs=1e-6)


@pytest.mark.method("removal")
def test_removing_what_does_nothing_leaves_the_perplexity_as_it_is(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model", idle=(2,))
    got = deepen.score(ck, "removal", text=TEXT3, context=CONTEXT)
    assert [got.columns[name].values[2] for name in ("removal", "removal.a", "removal.f")] == [0, 0, 0]
    whole = deepen.perplexity(ck.load(), ck.tokenizer(), TEXT3, context=CONTEXT).perplexity
    assert got.columns["removal.perplexity"].values[2] == pytest.approx(whole, rel=1e-12)
    assert got.calls["removal"] == 3 * (1 + 6 + 2 * 6)


@pytest.mark.method("removal")
def test_a_part_that_is_alone_has_no_value_of_its_own(tmp_path: Path) -> None:
    got = deepen.score(planted(tmp_path / "model").apply("0-2 3.a 4-5"), "removal", text=TEXT3, context=CONTEXT)
    assert math.isnan(got.columns["removal.a"].values[3])
    assert math.isnan(got.columns["removal.f"].values[3])
    assert got.rank("removal.a")[3] is None
    assert got.rank("removal")[3] is not None


@pytest.mark.method("effects")
def test_effects_by_hand(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model", "gpt2", idle=(3,))
    got = deepen.score(ck, "effects", text=TEXT3, context=CONTEXT, batch=2)
    effects = got.matrices["effects"].values
    assert (effects[np.tril_indices(6, -1)] == 0).all()
    assert np.diag(effects) == pytest.approx([1, 1, 1, 0, 1, 1], abs=1e-6)
    assert (effects[3] == 0).all()
    assert (effects[:, 3] == 0).all()
    assert math.isnan(got.columns["effects"].values[5])
    assert got.rank("effects")[3] == 5
    skip, model, ids = 1, ck.load(), ids_of(TEXT3)
    layers = list(model.transformer.h._modules.values())
    streams: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: streams.append(out))
    with torch.no_grad():
        embedded = model(ids, output_hidden_states=True).hidden_states[0]
        clean = [embedded, *streams]
        # skipping visit 1 for every token but the first
        layers[skip].register_forward_hook(lambda module, args, out: torch.cat((out[:, :1], args[0][:, 1:]), 1))
        streams.clear()
        layers[skip]._forward_hooks.move_to_end(next(iter(layers[skip]._forward_hooks)))
        model(ids)
    changed = [embedded, *streams]
    for later in range(skip + 1, 6):
        one, two = (each[later + 1] - each[later] for each in (clean, changed))
        expected = ((one - two)[:, 1:].norm(dim=-1) / one[:, 1:].norm(dim=-1).clamp_min(1e-30)).max().item()
        assert effects[skip, later] == pytest.approx(expected, rel=1e-4)


@pytest.mark.method("effects")
def test_the_largest_change_leaves_the_first_token_out() -> None:
    clean = torch.tensor([[[1.0, 0], [0, 2], [3, 0]]])
    assert largest_change(clean, torch.zeros_like(clean)) == 1
    assert largest_change(clean, torch.tensor([[[9.0, 9], [0, 2], [3, 1.5]]])) == 0.5
    assert largest_change(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)) == 0


@pytest.mark.method("lens")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_lens_at_the_top_is_the_model(tmp_path: Path, family: str) -> None:
    got = deepen.score(planted(tmp_path / "model", family), "lens", text=TEXT3, context=CONTEXT, batch=2)
    kl, same = (got.columns[name].values for name in ("lens", "lens.agreement"))
    assert (kl[-1], same[-1]) == (0, 1)
    assert min(kl[:-1]) > 0
    # every eighth of the tokens that have one after them
    assert got.columns["lens"].count == 3 * 2


@pytest.mark.method("lens")
def test_the_lens_is_the_norm_and_head_on_the_stream(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model")
    got = deepen.score(ck, "lens", text=TEXT3, context=CONTEXT)
    model, ids = ck.load(), ids_of(TEXT3)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        final = model(ids).logits[:, 0:15:8].double().softmax(-1)
        for visit in (0, 3):
            stopped = model.lm_head(model.model.norm(states[visit + 1]))[:, 0:15:8].double().log_softmax(-1)
            kl = (final * (final.log() - stopped)).sum(-1).mean().item()
            loss = -stopped.gather(-1, ids[:, 1:16:8, None]).mean().item()
            assert got.columns["lens"].values[visit] == pytest.approx(kl, rel=1e-4)
            assert got.columns["lens.loss"].values[visit] == pytest.approx(loss, rel=1e-4)


@pytest.mark.method("attention")
def test_spread_at_its_ends() -> None:
    even = torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None]
    first = torch.zeros(6, 6)
    first[:, 0] = 1
    entropy, mass, heads = spread(even.expand(2, 3, 6, 6))
    assert entropy.tolist() == pytest.approx([1, 1])
    assert mass.tolist() == pytest.approx([sum(1 / n for n in range(1, 7)) / 6] * 2)
    both = torch.stack((even, first)).expand(1, 2, 6, 6)
    entropy, mass, heads = spread(both)
    assert entropy.item() == pytest.approx(0.5)
    assert spread(first.expand(1, 3, 6, 6))[1].item() == 1
    assert heads.item() == 1
    far = torch.tril(torch.ones(64, 64)) / torch.arange(1, 65)[:, None]
    assert spread(far.expand(1, 1, 64, 64))[2].item() == 0
    assert is_attention(both)
    assert not is_attention(2 * both)
    assert not is_attention(both[0])


@pytest.mark.method("attention")
@pytest.mark.parametrize("family", ["llama", "bert", "mistral"])
def test_attention_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    ck = planted(tmp_path / "model", family)
    got = deepen.score(ck, "attention", text=TEXT3, context=CONTEXT, batch=2)
    model = ck.load(attn_implementation="eager")
    with torch.no_grad():
        weights = model(ids_of(TEXT3), output_attentions=True).attentions
    for visit, each in enumerate(weights):
        expected = [value.mean().item() for value in spread(each)]
        found = [got.columns[f"attention{name}"].values[visit] for name in ("", ".sink", ".sink.heads")]
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.method("attention")
def test_a_model_without_attention(tmp_path: Path) -> None:
    got = deepen.score(planted(tmp_path / "model", "mamba"), "attention", text=TEXT3, context=CONTEXT)
    assert "no layer of this model shows attention" in got.notes["attention"]
    assert not got.columns


@pytest.mark.method("taylor")
def test_taylor_by_hand(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model", idle=(4,))
    got = deepen.score(ck, "taylor", text=TEXT3, context=CONTEXT)
    model, ids = ck.load(), ids_of(TEXT3)
    model(ids, labels=ids).loss.backward()
    for at, layer in model.model.layers._modules.items():
        total = sum((p.grad * p).abs().sum().item() for p in layer.parameters() if p.dim() > 1)
        assert got.columns["taylor"].values[int(at)] == pytest.approx(total, rel=1e-4, abs=1e-9)
    assert got.columns["taylor"].values[4] == 0
    assert got.rank("taylor")[4] == 6
    many = deepen.score(ck, "taylor", text=TEXT3, context=CONTEXT, batch=3)
    assert many.columns["taylor"].values == pytest.approx(got.columns["taylor"].values, rel=1e-4)


@pytest.mark.method("magnitude")
def test_magnitude_by_hand(tmp_path: Path) -> None:
    ck = planted(tmp_path / "model", "gpt2", idle=(4,)).apply("0-4 (4-5)*2")
    got = deepen.score(ck, "magnitude", text=TEXT3, context=CONTEXT)
    layers = ck.load().transformer.h._modules
    sums = [sum(p.abs().sum().item() for p in layers[at].parameters() if p.dim() > 1) for at in "012345"]
    assert got.columns["magnitude"].values == pytest.approx([*sums[:4], sums[4], *sums[4:], *sums[4:]], rel=1e-6)
    assert got.rank("magnitude")[4] == 7
    assert got.calls == {"magnitude": 0}


def test_scores_that_need_a_head_are_named_and_skipped(tmp_path: Path) -> None:
    got = deepen.score(planted(tmp_path / "model", "bert"), *PASSES, text=TEXT[:64], context=CONTEXT)
    assert set(got.notes) == {"lens", "removal", "taylor"}
    assert all("needs a causal head" in note for note in got.notes.values())
    assert {"attention", "effects", "magnitude"} <= set(got.columns)


def test_a_copied_layer_is_redundant(tmp_path: Path) -> None:
    """Copies of a layer whose step is small: none of them is missed."""
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            weight.weight.mul_(0.01)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    ck = deepen.open(tmp_path / "model").apply("0-1 2 2 2 3-5")
    got = deepen.score(ck, "removal", "block_influence", "angular", "effects", text=TEXT3, context=CONTEXT)
    for name in ("removal", "block_influence", "angular", "effects"):
        values = np.abs(got.columns[name].values)
        assert max(values[2:5]) < 0.2 * np.nanmin(np.delete(values, [2, 3, 4])), name


@pytest.mark.parametrize("name", ["removal", "lens", "taylor"])
def test_logits_that_are_not_finite_are_refused(tmp_path: Path, name: str) -> None:
    ck = planted(tmp_path / "model")
    model = ck.load()
    with torch.no_grad():
        model.lm_head.weight[5, 0] = math.nan
    model.save_pretrained(tmp_path / "broken")
    ck.tokenizer().save_pretrained(tmp_path / "broken")
    with pytest.raises(DataError, match="not finite"):
        deepen.score(deepen.open(tmp_path / "broken"), name, text=TEXT3, context=CONTEXT)


def test_batches_and_progress(tmp_path: Path) -> None:
    ck, calls = planted(tmp_path / "model"), []
    options = {"text": TEXT[: 4 * CONTEXT + 5], "context": CONTEXT}
    one = deepen.score(ck, *PASSES, **options)
    many = deepen.score(ck, *PASSES, **options, batch=4, progress=lambda *given: calls.append(given))
    for name, column in one.columns.items():
        np.testing.assert_allclose(many.columns[name].values, column.values, rtol=1e-4, atol=1e-6, err_msg=name)
    assert sum(count for count, _ in calls) == 5 * len(PASSES)
    assert {total for _, total in calls} == {5 * len(PASSES)}
