"""Embeddings of n-grams: what a row follows from, how a cache keeps the tokens before, what is refused."""

from __future__ import annotations

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.grams import Grams
from deepen.stack.reprogram import reprogram
from deepen.stack.stack import Stack
from deepen.train.optim import groups

TOKENS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
CONFIG = StackConfig(layers=2, width=16, heads=2, vocabulary=60, grams=(2, 3), gram_rows=128)


def taught(config: StackConfig = CONFIG) -> Stack:
    """A stack in eval mode whose tables are no longer 0."""
    stack = Stack(config).eval()
    assert stack.grams is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(stack.grams.weight, std=0.5)
    return stack


def test_begins_as_the_stack_without() -> None:
    plain = Stack(CONFIG.model_copy(update={"grams": ()}))
    assert torch.equal(Stack(CONFIG)(TOKENS).logits, plain(TOKENS).logits)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_row_follows_from_the_last_n_tokens(n: int) -> None:
    tables = Grams([n], 4096, 8)
    before = tables(TOKENS)
    for back in range(TOKENS.shape[1]):
        changed = TOKENS.clone()
        changed[:, -1 - back] += 7
        same = torch.isclose(tables(changed), before).all(-1)[:, -1]
        assert same.tolist() == [back >= n] * 2


def test_lengths_have_tables_of_their_own() -> None:
    tables = Grams([2, 3], 64, 8)
    parts = [Grams([n], 64, 8) for n in (2, 3)]
    for place, part in enumerate(parts):
        part.weight.data = tables.weight.data[place * 64 : (place + 1) * 64]
    torch.testing.assert_close(tables(TOKENS), parts[0](TOKENS) + parts[1](TOKENS))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("rows", [1024, 1000])
def test_grams_spread_over_the_rows(n: int, rows: int) -> None:
    grams = torch.cartesian_prod(*[torch.arange(0, 4096, 4096 // round(4000 ** (1 / n)))] * n)
    found = Grams([n], rows, 2)._hashed(grams, 1)[0]
    share = len(found.unique()) / rows
    # what throwing so many balls at random would leave empty, and a little
    assert share > 1 - 1.5 * (1 - 1 / rows) ** len(grams) - 0.01


@pytest.mark.parametrize("padded", [False, True])
def test_with_a_cache_as_without(padded: bool) -> None:
    stack = taught()
    valid = torch.ones_like(TOKENS, dtype=torch.bool)
    valid[0, :3] = not padded
    whole = stack(TOKENS, valid=valid).logits
    cache, found = stack.new_cache(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
        given = valid[:, :end][:, start:] if padded else None
        found.append(stack(TOKENS[:, start:end], cache=cache, valid=given).logits)
    torch.testing.assert_close(torch.cat(found, 1)[valid], whole[valid], atol=1e-5, rtol=1e-5)


def test_padding_does_not_reach_the_tokens() -> None:
    stack = taught()
    padded = torch.cat([TOKENS.new_full((2, 4), 3), TOKENS], 1)
    valid = torch.arange(16).expand(2, -1) >= 4
    torch.testing.assert_close(stack(padded, valid=valid).logits[:, 4:], stack(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_tables_are_trained_without_decay_and_carried_to_another_program() -> None:
    stack = taught()
    stack(TOKENS).logits.logsumexp(-1).sum().backward()
    assert stack.grams is not None
    assert stack.grams.weight.grad is not None
    assert (stack.grams.weight.grad != 0).any()
    decayed, plain = groups(stack)
    assert "grams.weight" in plain
    assert "embedding.weight" in decayed
    made, _ = reprogram(stack, "0 (1)*2")
    assert made.grams is not None
    assert torch.equal(made.grams.weight, stack.grams.weight)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"grams": (1, 2)}, r"grams: got \[1, 2\], expected lengths of 2 or more, each once"),
        ({"grams": (2, 2)}, r"grams: got \[2, 2\]"),
        ({"grams": (2,), "gram_rows": 0}, "gram_rows"),
        ({"grams": (2,), "input": "series", "output": "classes", "classes": 3}, "grams are of tokens"),
    ],
)
def test_what_does_not_fit(fields: dict[str, object], wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        StackConfig.read({"layers": 1, "width": 8, "heads": 2, **fields})
