"""A text as batches to train on and a part at its end that is held out.

    text      |------------- trained on -------------|-- held out --|
    windows   [s t0 t1 t2] [s t3 t4 t5] ...                            s: what the tokenizer puts before a text

Every window has `context` tokens; what is left over at the end is not read. Each epoch has its own order, drawn from
the seed and the number of the epoch, so the batch of a step depends on nothing else and a resumed run needs no more
than its step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from deepen.errors import DataError, UsageError
from deepen.probe.windows import encode, frame
from deepen.tasks.task import dice

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of each step.

    Attributes:
        windows: [n, t] token ids.
        start: where the text begins in a window.
        batch: windows of a batch.
        seed: of the order.

    Raises:
        DataError: fewer windows than a batch.
    """

    windows: torch.Tensor
    start: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.windows) < self.batch:
            raise DataError(
                f"the part of the text to train on has {len(self.windows)} windows of {self.windows.shape[1]} tokens, "
                f"fewer than a batch of {self.batch}; give more text, or lower --context or --batch"
            )

    @property
    def scored_from(self) -> int:
        """The first token of a window that has something before it to be predicted from."""
        return max(1, self.start)

    @cached_property
    def digest(self) -> str:
        """Tells this data from other data."""
        return hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()[:16]

    @cached_property
    def _orders(self) -> dict[int, torch.Tensor]:
        return {}

    def __call__(self, step: int) -> torch.Tensor:
        """The batch of a step, [b, t]; an epoch ends where no whole batch is left."""
        epoch, at = divmod(step, len(self.windows) // self.batch)
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = torch.from_numpy(dice(self.seed, epoch).permutation(len(self.windows)))
        return self.windows[self._orders[epoch][at * self.batch : (at + 1) * self.batch]]


def batches_of(tokenizer: PreTrainedTokenizerBase, text: str, *, context: int, batch: int, seed: int = 0) -> Batches:
    """The batches of a text.

    Args:
        tokenizer: of the model.
        text: what to train on.
        context: tokens of a window, those that the tokenizer puts before a text included.
        batch: windows of a batch.
        seed: of the order.

    Raises:
        UsageError: a context that leaves no text in a window.
        DataError: fewer windows than a batch.
    """
    before, _ = frame(tokenizer)
    room = context - len(before)
    if room < 2:
        raise UsageError(f"a context of {context} tokens leaves {room} for text; expected at least 2: raise --context")
    ids, _ = encode(tokenizer, text, None)
    count = len(ids) // room
    rows = torch.tensor(ids[: count * room], dtype=torch.int64).view(count, room)
    opening = torch.tensor(before, dtype=torch.int64).expand(count, -1)
    return Batches(torch.cat([opening, rows], 1), len(before), batch, seed)


def split(text: str, held_out: float) -> tuple[str, str]:
    """The part of a text to train on, and the last share of it, which is not.

    Raises:
        UsageError: a share outside of 0 to 1, or one that leaves a part empty.
    """
    at = round(len(text) * (1 - held_out)) if 0 < held_out < 1 else 0
    if not text[:at].strip() or not text[at:].strip():
        raise UsageError(f"--held-out {held_out}: expected a share between 0 and 1 that leaves text on both sides")
    return text[:at], text[at:]
