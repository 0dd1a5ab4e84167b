"""A model of a few hundred weights that has what a language model has: ids in, logits out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepen.train.data import Batches

VOCABULARY, WIDTH = 7, 6


class Bag(nn.Module):
    """Embedding, one block with a norm and dropout, a head."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.drop = nn.Dropout(dropout)
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        stream = self.embed(input_ids)
        stream = stream + self.drop(torch.tanh(self.inner(self.norm(stream))))
        return SimpleNamespace(logits=self.head(stream))


def counting(batch: int = 4, tokens: int = 9, windows: int = 24, seed: int = 0) -> Batches:
    """Windows that count upwards modulo the vocabulary, so that there is something to learn."""
    ids = (torch.arange(windows)[:, None] + torch.arange(tokens)) % VOCABULARY
    return Batches(ids, 0, batch, seed)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}
