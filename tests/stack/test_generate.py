"""Generation from a stack against the plainest possible reference: a full forward pass for every token."""

from __future__ import annotations

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.generate import Sampling, by_columns, generate, stream
from tests.stack.test_stack import TOKENS, logits, stack


@pytest.mark.parametrize("wiring", ["pre-ln", "denseformer", "hyper-connections", "attention-residuals"])
def test_greedy_takes_the_most_likely_token_of_a_full_pass(wiring: str) -> None:
    model = stack("0 (1-2)*2 3", wiring=wiring)
    expected = TOKENS
    for _ in range(6):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, TOKENS, steps=6), expected)


def test_padded_prompts_continue_as_they_do_alone() -> None:
    model = stack()
    short = TOKENS[:1, 3:]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1)
    both = torch.cat([TOKENS[1:], padded])
    valid = torch.ones_like(both, dtype=torch.bool)
    valid[1, :3] = False
    made = generate(model, both, steps=5, valid=valid)
    assert torch.equal(made[:1], generate(model, TOKENS[1:], steps=5))
    assert torch.equal(made[1:, 3:], generate(model, short, steps=5))
    with pytest.raises(UsageError, match="before the tokens"):
        generate(model, both, steps=1, valid=valid.flip(1))


def test_a_sequence_stops_at_its_token() -> None:
    model = stack()
    whole = generate(model, TOKENS[:1], steps=8)[0, 9:]
    stop = int(whole[2])
    first = whole.tolist().index(stop)
    assert generate(model, TOKENS[:1], steps=8, stop=stop)[0, 9:].tolist() == whole[: first + 1].tolist()


def test_streaming_gives_the_same_tokens_one_at_a_time() -> None:
    model = stack()
    pieces = list(stream(model, TOKENS, steps=4))
    assert [piece.shape for piece in pieces] == [(2,)] * 4
    assert torch.equal(torch.stack(pieces, dim=1), generate(model, TOKENS, steps=4)[:, 9:])


def test_sampling_keeps_what_it_should() -> None:
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    many = row.expand(4000, 4)
    draw = torch.Generator().manual_seed(0)
    shares = Sampling(temperature=1).choose(many, draw).bincount(minlength=4) / 4000
    assert (shares - row.exp()[0]).abs().max() < 0.03
    assert set(Sampling(temperature=1, top_k=2).choose(many, draw).tolist()) == {0, 1}
    # 0.5 does not reach 0.6, so the second stays too; with 0.5 the first alone reaches it
    assert set(Sampling(temperature=1, top_p=0.6).choose(many, draw).tolist()) == {0, 1}
    assert set(Sampling(temperature=1, top_p=0.5).choose(many, draw).tolist()) == {0}
    cold = Sampling(temperature=0.5).choose(many, draw).bincount(minlength=4) / 4000
    assert (cold - (row.exp()[0] ** 2) / (row.exp()[0] ** 2).sum()).abs().max() < 0.03


def test_the_seed_decides_what_is_sampled() -> None:
    model = stack()
    once, again, other = (
        generate(model, TOKENS, steps=12, sampling=Sampling(temperature=2, seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Sampling(**wrong)  # pyright: ignore[reportArgumentType]


def test_what_cannot_generate() -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(stack(), TOKENS[:, :0], steps=1)
    with pytest.raises(UsageError, match="not causal"):
        generate(stack(causal=False), TOKENS, steps=1)
    with pytest.raises(UsageError, match="learned 10 positions"):
        generate(stack(positions="learned", context=10), TOKENS, steps=3)


def test_a_stack_that_has_generated_can_be_trained() -> None:
    model = stack("0 (1-2)*2 3")
    generate(model, TOKENS, steps=3)
    model(TOKENS).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_matrices_by_columns_are_the_same_model() -> None:
    model = stack("0 (1-2)*2 3")
    expected, state = logits(model, TOKENS), {name: each.clone() for name, each in model.state_dict().items()}
    assert by_columns(model) is model
    assert not model.layers[0].f.sublayer.up.weight.is_contiguous()
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("wiring", ["pre-ln", "hyper-connections"])
def test_compiled_steps_give_the_same_tokens_and_are_compiled_once(wiring: str) -> None:
    model = stack("0 (1-2)*2 3", wiring=wiring)
    eager = generate(model, TOKENS, steps=24)
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    assert torch.equal(generate(model, TOKENS, steps=24, compiled=True), eager)
    assert torch.equal(generate(model, TOKENS[:, :3], steps=9, compiled=True), generate(model, TOKENS[:, :3], steps=9))
    assert counted["unique_graphs"] == before + 1
