"""DC-Bi-LSTM: each bidirectional LSTM reads the words and the outputs of all layers before it.

    x^l_t = [e_t; h^1_t; ..; h^l-1_t]        h^l_t = [forward_t; backward_t] of an LSTM of u units over x^l
    y = W mean_t h^L_t + b

    e ─┬─ LSTM ─ h^1 ─┬─ LSTM ─ h^2 ─┬─ ... ─ h^L ─ mean ─ y
       └──────────────┴──────────────┘

Layer l reads d + 2 u (l - 1) values; a direction has 4 u (d_in + u + 2) parameters, with the two biases of torch. The
last layer is wider. `dense=False` is the plain stack, in which a layer reads the one before it alone.

Source: Ding et al., Densely Connected Bidirectional LSTM with Applications to Sentence Classification,
arXiv:1802.00889.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from deepen.errors import UsageError
from deepen.registry import method
from deepen.stack.shapes.base import ShapeConfig, initialise, seeded


class DCBiLSTMConfig(ShapeConfig):
    """What a DC-Bi-LSTM is built from.

    Attributes:
        vocabulary: number of token ids.
        classes: to tell apart.
        width: d, of the word embeddings.
        layers: L.
        units: u, of each direction of all layers but the last.
        last: units of each direction of the last layer.
        dense: False for the plain stack.
    """

    vocabulary: int = Field(ge=1)
    classes: int = Field(default=2, ge=1)
    width: int = Field(default=300, ge=1)
    layers: int = Field(default=15, ge=1)
    units: int = Field(default=13, ge=1)
    last: int = Field(default=100, ge=1)
    dense: bool = True

    @property
    def plan(self) -> list[tuple[int, int]]:
        """Values read, and units of a direction, of each layer."""
        found = []
        for index in range(self.layers):
            reads = self.width + 2 * self.units * index if self.dense or not index else 2 * self.units
            found.append((reads, self.units if index < self.layers - 1 else self.last))
        return found

    @property
    def parameters(self) -> int:
        layers = sum(2 * 4 * units * (reads + units + 2) for reads, units in self.plan)
        return self.vocabulary * self.width + layers + (2 * self.last + 1) * self.classes


@method(
    "dc-bi-lstm",
    family="shape",
    source="arXiv:1802.00889",
    title="Densely Connected Bidirectional LSTM with Applications to Sentence Classification",
    mechanism="each bidirectional LSTM reads the words and the outputs of all layers before it",
    cost="parameters grow with the square of depth; one step a token, layer and direction",
)
class DCBiLSTM(nn.Module):
    """A classifier of sentences.

    Args:
        config: what to build.
        seed: of the initial values; None draws from torch's generator.

    Example:
        >>> config = DCBiLSTMConfig(vocabulary=20, width=8, layers=3, units=4, last=6)
        >>> DCBiLSTM(config)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 2])
    """

    def __init__(self, config: DCBiLSTMConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            layers = (nn.LSTM(reads, units, batch_first=True, bidirectional=True) for reads, units in config.plan)
            self.layers = nn.ModuleList(layers)
            self.head = nn.Linear(2 * config.last, config.classes)
            initialise(self)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T) ids -> (B, classes).

        Args:
            tokens: ids; those after a sentence's end are not read.
            lengths: (B,), tokens of each sentence; None when all have T.

        Raises:
            UsageError: an empty sentence, or one longer than T.
        """
        total = tokens.shape[1]
        if lengths is None:
            lengths = torch.full(tokens.shape[:1], total)
        least, most = int(lengths.min()), int(lengths.max())
        if least < 1 or most > total:
            raise UsageError(f"sentences of {least} to {most} tokens in {total} places; expected 1 to {total}")
        lengths = lengths.cpu()
        x, y = self.embedding(tokens), tokens.new_zeros(0)
        for layer in self.layers:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=total)
            x = torch.cat([x, y], dim=-1) if self.config.dense else y
        # places after the end hold zeros
        return self.head(y.sum(dim=1) / lengths[:, None].to(y))
