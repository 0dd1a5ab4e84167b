"""Perplexity against a computation by hand, and the laws that any right implementation keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepen
from deepen.checkpoint.tiny import tiny_model
from deepen.errors import DataError, FamilyError, UsageError
from deepen.probe import perplexity as module
from deepen.probe.perplexity import Evaluation, is_causal, perplexity
from deepen.probe.windows import batches, cut, encode, frame
from tests.cli.models import TEXT, tokenizer

CONTEXT = 16
ACCENTS = "the café is née of a fiancé, said the king. " * 3


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def by_hand(model, text: str, context: int, bos: bool) -> tuple[float, int, int]:
    """Nats, tokens and bytes, one window and one token at a time, in fp64; a letter is a token."""
    letters = list(text)
    room = context - bos
    total, count, size = 0.0, 0, 0
    for at in range(0, len(letters), room):
        piece = letters[at : at + room]
        if len(piece) < 2:
            continue
        ids = [1] * bos + tokenizer()("".join(piece), add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy().astype(np.float64)
        for place in range(1, len(ids)):
            row = logits[place - 1]
            total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[place]]
            count += 1
            size += len(piece[place - bos].encode())
    return total, count, size


@pytest.mark.parametrize("bos", [False, True], ids=["without BOS", "with BOS"])
@pytest.mark.parametrize("text", [TEXT[:100], ACCENTS], ids=["ascii", "accents"])
def test_equals_the_computation_by_hand(model, text: str, bos: bool) -> None:
    got = perplexity(model, tokenizer(bos=bos), text, context=CONTEXT)
    nll, count, size = by_hand(model, text, CONTEXT, bos)
    assert (got.tokens, got.bytes) == (count, size)
    assert got.nll == pytest.approx(nll, rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert got.bits_per_byte == pytest.approx(nll / math.log(2) / size, rel=1e-6)


def test_with_bos_every_token_of_the_text_is_scored(model) -> None:
    text = TEXT[:77]
    assert perplexity(model, tokenizer(bos=True), text, context=12).tokens == 77
    assert perplexity(model, tokenizer(), text, context=11).tokens == 77 - 7


@pytest.mark.parametrize("extra, windows", [(0, 3), (1, 3), (2, 4), (15, 4)])
def test_the_last_window_is_scored_if_it_has_two_tokens(model, extra: int, windows: int) -> None:
    got = perplexity(model, tokenizer(), TEXT[: 3 * CONTEXT + extra], context=CONTEXT)
    assert (got.windows, got.tokens) == (windows, 3 * (CONTEXT - 1) + max(0, extra - 1))


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    blank = tiny_model("llama")
    with torch.no_grad():
        blank.lm_head.weight.zero_()
    got = perplexity(blank, tokenizer(), TEXT[:64], context=CONTEXT)
    assert got.perplexity == pytest.approx(96, rel=1e-6)
    assert got.bits_per_byte == pytest.approx(math.log2(96), rel=1e-6)


@pytest.mark.parametrize("batch", [2, 3, 100])
def test_the_batch_changes_nothing(model, batch: int) -> None:
    one, many = (perplexity(model, tokenizer(), TEXT[:90], context=CONTEXT, batch=size) for size in (1, batch))
    assert many.nll == pytest.approx(one.nll, rel=1e-6)
    assert (many.tokens, many.bytes, many.windows) == (one.tokens, one.bytes, one.windows)


def test_windows_add_up(model) -> None:
    pieces = [TEXT[at : at + CONTEXT] for at in range(0, 4 * CONTEXT, CONTEXT)]
    whole = perplexity(model, tokenizer(), "".join(pieces), context=CONTEXT)
    parts = [perplexity(model, tokenizer(), piece, context=CONTEXT) for piece in pieces]
    assert whole.nll == pytest.approx(sum(part.nll for part in parts), rel=1e-6)
    reordered = perplexity(model, tokenizer(), "".join(reversed(pieces)), context=CONTEXT)
    assert reordered.nll == pytest.approx(whole.nll, rel=1e-6)


def test_tokens_reads_the_head_of_the_text(model) -> None:
    limited = perplexity(model, tokenizer(), TEXT, context=CONTEXT, tokens=40)
    cut_off = perplexity(model, tokenizer(), TEXT[:40], context=CONTEXT)
    assert limited.nll == pytest.approx(cut_off.nll, rel=1e-9)
    assert limited.read == cut_off.read == 40


def test_the_pieces_of_the_log_softmax_change_nothing(model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = perplexity(model, tokenizer(), TEXT[:64], context=CONTEXT)
    monkeypatch.setattr(module, "CHUNK", 100)
    assert perplexity(model, tokenizer(), TEXT[:64], context=CONTEXT).nll == pytest.approx(whole.nll, rel=1e-7)


def test_progress_counts_every_window(model) -> None:
    calls: list[tuple[int, int]] = []
    got = perplexity(
        model, tokenizer(), TEXT[:100], context=CONTEXT, batch=2, progress=lambda count, all: calls.append((count, all))
    )
    assert sum(count for count, _ in calls) == got.windows == 7
    assert {total for _, total in calls} == {7}


def test_perplexity_is_exported() -> None:
    assert deepen.perplexity is perplexity
    assert deepen.Evaluation is Evaluation


def test_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    huge = Evaluation(nll=1e6, tokens=1, bytes=1, windows=1, context=2, read=2, seconds=1.0)
    assert huge.perplexity == math.inf


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"context": 65}, UsageError, "64 positions"),
        ({"context": 1}, UsageError, "at least 2"),
        ({"context": 16, "tokens": 15}, UsageError, "fewer than one window of 16"),
        ({"context": 16, "batch": 0}, UsageError, "at least 1 window"),
    ],
)
def test_options_that_do_not_fit(model, options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        perplexity(model, tokenizer(), TEXT, **options)


def test_a_text_shorter_than_a_window(model) -> None:
    with pytest.raises(DataError, match="the text has 15 tokens, fewer than one window of 16"):
        perplexity(model, tokenizer(), TEXT[:15], context=CONTEXT)


def test_logits_that_are_not_finite() -> None:
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = math.nan
    with pytest.raises(DataError, match="not finite"):
        perplexity(broken, tokenizer(), TEXT, context=CONTEXT)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_model_that_sees_what_follows_is_refused(family: str) -> None:
    # transformers gives BERT a class named after language models, which attends in both directions
    seeing = tiny_model(family)
    assert not is_causal(seeing)
    with pytest.raises(FamilyError, match="no causal head"):
        perplexity(seeing, tokenizer(), TEXT, context=CONTEXT)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "qwen3_moe"])
def test_causal_models_are_known(family: str) -> None:
    assert is_causal(tiny_model(family))


def test_a_tokenizer_without_offsets_is_refused(model) -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            return type("Encoding", (), {"input_ids": [7] * len(text)})()

    with pytest.raises(DataError, match="does not say which characters"):
        perplexity(model, Slow(), TEXT, context=CONTEXT)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "options, expected", [({}, ([], [])), ({"bos": True}, ([1], [])), ({"encoder": True}, ([1], [2]))]
)
def test_frame(options: dict, expected: tuple) -> None:
    assert frame(tokenizer(**options)) == expected


@given(st.text("abc é.\n", min_size=30, max_size=200), st.integers(4, 20), st.booleans())
def test_windows_cover_the_text(text: str, context: int, bos: bool) -> None:
    made = tokenizer(bos=bos)
    ids, edges = encode(made, text, None)
    assert edges[-1] == len(text.encode())
    assert len(edges) == len(ids) + 1
    windows = cut(made, text, context=context, tokens=None)
    covered = [token for window in windows for token in window.ids[window.start :]]
    assert covered == ids[: len(covered)]
    assert len(ids) - len(covered) < 2
    assert all(len(window.ids) <= context for window in windows)
    assert all(len(window.edges) == len(window.ids) - window.start + 1 for window in windows)
    assert [window for group in batches(windows, 3) for window in group] == windows


def test_of_a_long_text_only_the_head_is_tokenised() -> None:
    made = tokenizer()
    long = TEXT * 50
    assert encode(made, long, 100) == tuple(part[: 100 + extra] for extra, part in enumerate(encode(made, long, None)))
