"""The n-gram: it sums to one, and equals the formula worked out with dictionaries."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from deepen.errors import DataError
from deepen.tasks.kneser_ney import KneserNey, discounts_of


def plain(text: bytes, order: int, history: bytes, byte: int) -> float:
    """The probability of a byte after a history, from the counts in words of the formula."""

    def counts(length: int, top: bool) -> dict[bytes, int]:
        grams = [text[i : i + length] for i in range(len(text) - length + 1)]
        if top:
            return Counter(grams)
        longer = {text[i : i + length + 1] for i in range(len(text) - length)}
        before = Counter(gram[1:] for gram in longer)
        return {gram: before[gram] for gram in set(grams)}

    def p(length: int, history: bytes) -> float:
        if length == 0:
            return 1 / 256
        lower = p(length - 1, history[1:])
        found = counts(length, length == order)
        n = [sum(count == times for count in found.values()) for times in (1, 2, 3, 4)]
        d = [0.0, 0.5, 0.5, 0.5]
        if all(n):
            y = n[0] / (n[0] + 2 * n[1])
            d = [0.0, *(min(max(j - (j + 1) * y * n[j] / n[j - 1], 0), j) for j in (1, 2, 3))]
        mine = {gram: count for gram, count in found.items() if gram[:-1] == history}
        total = sum(mine.values())
        if not total:
            return lower
        count = mine.get(history + bytes([byte]), 0)
        freed = sum(d[min(count, 3)] for count in mine.values())
        return (max(count - d[min(count, 3)], 0) + freed * lower) / total

    return p(order, history)


def text_of(size: int, letters: str, seed: int) -> bytes:
    draw = random.Random(seed)
    weights = [1 / (place + 1) for place in range(len(letters))]
    return "".join(draw.choices(letters, weights, k=size)).encode()


@pytest.mark.parametrize(("order", "size"), [(1, 60), (2, 200), (3, 300), (4, 5)])
def test_every_probability_is_that_of_the_formula(order: int, size: int) -> None:
    text = text_of(size, "abcdefghij", 1)
    model = KneserNey(text, order)
    asked = text_of(40, "abcdefghijz", 2)
    found = model.probabilities(asked, order)
    for place in range(order - 1, len(asked)):
        history = asked[place - order + 1 : place]
        assert found[place] == pytest.approx(plain(text, order, history, asked[place]), abs=1e-12)


@pytest.mark.parametrize("history", [b"ab", b"zz", b"az", b"za"])
def test_the_probabilities_after_a_history_sum_to_one(history: bytes) -> None:
    model = KneserNey(text_of(400, "abcdef", 3), 3)
    total = sum(model.probabilities(history + bytes([byte]), 3)[2] for byte in range(256))
    assert total == pytest.approx(1)


def test_the_first_bytes_have_shorter_histories() -> None:
    model = KneserNey(text_of(400, "abcdef", 3), 3)
    other = KneserNey(text_of(400, "abcdef", 3), 1)
    # the shorter grams of a model count what came before them, so they are not those of a model of that order
    assert model.probabilities(b"abc", 3)[0] == model.probabilities(b"a", 3)[0]
    assert model.probabilities(b"a", 3)[0] != other.probabilities(b"a", 1)[0]


def test_the_order_is_that_of_the_fewest_bits_and_a_start_leaves_out_what_is_before() -> None:
    text = text_of(3000, "abcdefghij", 4)
    model = KneserNey(text, 5)
    asked = text_of(500, "abcdefghij", 5)
    order, bits = model.best_order(asked, 50)
    assert len(bits) == 5
    assert order == 1 + int(np.argmin(bits)) < 4
    assert bits[order - 1] == model.bits(asked, order, 50)
    assert bits[order - 1] == pytest.approx(-np.log2(model.probabilities(asked, order)[50:]).mean())


def test_text_that_repeats_is_cheap_and_random_bytes_are_not() -> None:
    assert KneserNey(b"abcdefgh" * 50, 4).bits(b"abcdefgh" * 5, 4, 8) < 0.2
    noise = random.Random(0).randbytes(4000)
    assert KneserNey(noise, 3).bits(random.Random(1).randbytes(1000), 3) > 7.5


def test_short_texts_have_fixed_discounts_and_too_short_ones_are_refused() -> None:
    assert discounts_of(np.array([1, 1, 5])).tolist() == [0.0, 0.5, 0.5, 0.5]
    with pytest.raises(DataError, match="order 3 cannot be fitted to 2 bytes"):
        KneserNey(b"ab", 3)
