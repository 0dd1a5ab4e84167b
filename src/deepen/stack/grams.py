"""Embeddings of n-grams: the last n tokens, hashed to the row of a table, beside the embedding of the token itself.

    x_i = E[t_i] + sum_n E_n[h(t_{i-n+1} ... t_i)]        h = sum_k (t_{i-k} + 1) A^k, mixed, modulo the rows

A row costs no product of matrices, so the tables may be much larger than the layers. The rows begin at 0: a new stack
computes what it does without them. Places before the first token and padding count as a token of their own.

Sources: Huang et al., Over-Tokenized Transformer, arXiv:2501.16975 (n-gram tables over tokens); Pagnoni et al., Byte
Latent Transformer, arXiv:2412.09871 (rolling hashes). The mixing of the hash is deepen's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from deepen.wiring.base import Earlier

# Where a cache keeps the last tokens, beside what the wiring keeps by site.
LAST = -2
# Odd numbers; products wrap at 64 bits, alike on every machine.
FACTOR = 1_000_003
MIXER = 0x5851F42D4C957F2D
# The id of what is no token.
NONE = -1


class Grams(nn.Embedding):
    """The tables of all lengths, one after another.

    Args:
        lengths: n of each table.
        rows: of each table.
        width: D.
    """

    # most rows are not seen in most steps, in each of which it would shrink them
    decays = False

    def __init__(self, lengths: Sequence[int], rows: int, width: int) -> None:
        super().__init__(len(lengths) * rows, width)
        self.lengths, self.rows = tuple(lengths), rows

    def forward(self, input: torch.Tensor, earlier: Earlier | None = None) -> torch.Tensor:
        """What is added to the embeddings of tokens (B, T): (B, T, D)."""
        seen = self._seen(input, earlier or Earlier())
        found = [super(Grams, self).forward(rows) for rows in self._hashed(seen, input.shape[1])]
        return torch.stack(found).sum(0)

    def _seen(self, tokens: torch.Tensor, earlier: Earlier) -> torch.Tensor:
        """The tokens (B, max n - 1 + T), those before them included; the cache gets the last ones."""
        before = max(self.lengths) - 1
        if earlier.valid is not None:
            tokens = tokens.masked_fill(~earlier.valid, NONE)
        held = earlier.held.get(LAST)
        seen = F.pad(tokens, (before, 0), value=NONE) if held is None else torch.cat([held, tokens], 1)
        if earlier.kept is not None:
            earlier.kept[LAST] = seen[:, -before:]
        return seen

    def _hashed(self, seen: torch.Tensor, length: int) -> list[torch.Tensor]:
        """The row (B, T) of the gram that ends at each token, for each n."""
        found: list[torch.Tensor] = []
        start = seen.shape[1] - length
        for place, n in enumerate(self.lengths):
            hashed = torch.zeros_like(seen[:, start:])
            for back in reversed(range(n)):
                hashed = hashed * FACTOR + seen[:, start - back : seen.shape[1] - back] + 1
            # all bits move into the low ones, which alone would forget the high bits of the ids
            hashed = (hashed ^ (hashed >> 32)) * MIXER
            hashed = hashed ^ (hashed >> 29)
            found.append(hashed.remainder(self.rows) + place * self.rows)
        return found
