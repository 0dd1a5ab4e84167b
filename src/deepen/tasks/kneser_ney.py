"""A byte n-gram with interpolated, modified Kneser-Ney smoothing: what a trained model has to beat.

    p_k(w | h) = max(c(hw) - D(c(hw)), 0) / c(h) + g(h) p_(k-1)(w | h')        h' is h without its first byte
    g(h)       = (D1 N1(h) + D2 N2(h) + D3 N3(h)) / c(h)                       p_0 = 1/256

c counts a gram of the highest order in the text; below it, c is the number of different bytes that were seen before the
gram. Nj(h) counts the bytes that came j times after h, N3 those of 3 times or more. With n_j grams of count j:

    Y = n1 / (n1 + 2 n2)        Dj = j - (j + 1) Y n_(j+1) / n_j

Where a text is too short for these, D is 1/2. A history that never came gives p_(k-1) alone.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1999.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepen.errors import DataError

BYTES = 256


@dataclass(frozen=True, eq=False)
class Counts:
    """The grams of one length k, in the order of their keys, under one way to count them.

    Attributes:
        gram: [g] the count of each.
        total: [h] c(h) of each history, a gram of length k - 1.
        freed: [h] c(h) g(h), what the discounts take.
        discounts: D of a count of 0, 1, 2 and 3 or more.
    """

    gram: NDArray[np.int64]
    total: NDArray[np.float64]
    freed: NDArray[np.float64]
    discounts: NDArray[np.float64]

    @classmethod
    def of(cls, gram: NDArray[np.int64], history: NDArray[Any], histories: int) -> Counts:
        """The sums of counts [g] over the histories [g] that they belong to."""
        discounts = discounts_of(gram)
        total = np.bincount(history, gram, histories).astype(np.float64)
        freed = np.bincount(history, discounts[np.minimum(gram, 3)], histories).astype(np.float64)
        return cls(gram, total, freed, discounts)


def discounts_of(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """D of a count of 0, 1, 2 and 3 or more, from the counts [g] of all grams."""
    n = [float((counts == times).sum()) for times in (1, 2, 3, 4)]
    if not all(n):
        return np.array([0.0, 0.5, 0.5, 0.5])
    share = n[0] / (n[0] + 2 * n[1])
    found = [times - (times + 1) * share * n[times] / n[times - 1] for times in (1, 2, 3)]
    # a count cannot lose more than it is, nor gain
    return np.array([0.0, *(min(max(each, 0.0), times) for times, each in enumerate(found, 1))])


class KneserNey:
    """An n-gram of bytes.

    Args:
        text: what is counted.
        order: the longest gram.

    Raises:
        DataError: a text that has no gram of this length.

    Example:
        >>> round(KneserNey(b"abracadabra" * 9, 3).bits(b"abracadabra", 3), 1) < 2
        True
    """

    def __init__(self, text: bytes, order: int) -> None:
        if not 1 <= order <= len(text):
            raise DataError(f"an n-gram of order {order} cannot be fitted to {len(text)} bytes; give more text")
        self.order = order
        self.keys: list[NDArray[np.int64]] = []
        # of the grams of each length: by how often they came, and by how many bytes they came after
        self.raw: list[Counts] = []
        self.continued: list[Counts] = []
        symbols = np.frombuffer(text, np.uint8).astype(np.int64)
        # the gram of the length before that begins at each place
        ids, histories = np.zeros(len(symbols) + 1, np.int64), 1
        for length in range(1, order + 1):
            pairs = ids[: len(symbols) - length + 1] * BYTES + symbols[length - 1 :]
            keys, first, longer, counts = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)
            if length > 1:
                # each different gram without its first byte
                self._continue(ids[first + 1])
            self.keys.append(keys)
            self.raw.append(Counts.of(counts.astype(np.int64), keys // BYTES, histories))
            ids, histories = longer.astype(np.int64), len(keys)

    def _continue(self, suffixes: NDArray[np.int64]) -> None:
        """Counts what came before the grams of the last length."""
        keys, histories = self.keys[-1], len(self.raw[-1].total)
        before = np.bincount(suffixes, minlength=len(keys)).astype(np.int64)
        self.continued.append(Counts.of(before, keys // BYTES, histories))

    def probabilities(self, text: bytes, order: int) -> NDArray[np.float64]:
        """The probability [t] of each byte of a text given up to `order` - 1 bytes before it in that text."""
        return self._all(text, order)[order - 1]

    def bits(self, text: bytes, order: int, start: int = 0) -> float:
        """Bits a byte of a text from `start` on; the bytes before are history."""
        return float(-np.log2(self.probabilities(text, order)[start:]).mean())

    def best_order(self, text: bytes, start: int = 0) -> tuple[int, tuple[float, ...]]:
        """The order with the fewest bits a byte of a text, and the bits of each order from 1 on."""
        bits = tuple(float(-np.log2(each[start:]).mean()) for each in self._all(text, self.order))
        return 1 + int(np.argmin(bits)), bits

    def _all(self, text: bytes, order: int) -> list[NDArray[np.float64]]:
        """The probabilities [t] of the bytes of a text under each order up to one."""
        symbols = np.frombuffer(text, np.uint8).astype(np.int64)
        size = len(symbols)
        lower, found = np.full(size, 1 / BYTES), []
        # the gram of the length before that begins at each place, -1 where the counted text has none
        ids = np.zeros(size + 1, np.int64)
        for length in range(1, order + 1):
            places = max(size - length + 1, 0)
            history = ids[:places]
            pairs = np.where(history < 0, -1, history * BYTES + symbols[length - 1 :])
            at = np.searchsorted(self.keys[length - 1], pairs).clip(max=len(self.keys[length - 1]) - 1)
            gram = np.where((self.keys[length - 1][at] == pairs) & (history >= 0), at, -1)
            ends = slice(length - 1, None)
            found.append(lower.copy())
            found[-1][ends] = _mixed(self.raw[length - 1], gram, history, lower[ends])
            if length < order:
                lower = lower.copy()
                lower[ends] = _mixed(self.continued[length - 1], gram, history, lower[ends])
            ids = gram
        return found


def _mixed(
    counts: Counts, gram: NDArray[np.int64], history: NDArray[np.int64], lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    """p_k [t] of grams [t] and histories [t], -1 where unknown, over p_(k-1) [t]."""
    count = np.where(gram >= 0, counts.gram[gram], 0)
    total = np.where(history >= 0, counts.total[history], 0.0)
    kept = np.maximum(count - counts.discounts[np.minimum(count, 3)], 0.0)
    share = np.where(history >= 0, counts.freed[history], 0.0)
    known = total > 0
    safe = np.where(known, total, 1.0)
    return np.where(known, kept / safe + share / safe * lower, lower)
