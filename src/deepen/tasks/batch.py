"""What a task hands to the training loop: inputs, and what should come out of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The target where nothing is asked.
IGNORED = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Inputs and targets.

    Attributes:
        inputs: [b, t] token ids, [b, c, h, w] images or [b, c, t] series.
        targets: [b, t] token ids, `IGNORED` where nothing is asked, or [b] classes.
        share: targets to divide the loss of this batch by; None: as many as it has. Pieces of one batch share the
            number that makes their mean loss that of the whole.
        bytes: of text that the targets stand for; 0 where they are no text.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    share: float | None = None
    bytes: int = 0

    @property
    def asked(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.inputs)

    def numel(self) -> int:
        """Tokens, or examples where each has one target."""
        return self.targets.numel()

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(inputs=self.inputs.to(device), targets=self.targets.to(device), share=self.share, bytes=self.bytes)

    def chunk(self, pieces: int) -> tuple[Batch, ...]:
        """So many equal pieces."""
        share = self.asked / pieces
        return tuple(
            Batch(inputs=inputs, targets=targets, share=share)
            for inputs, targets in zip(self.inputs.chunk(pieces), self.targets.chunk(pieces), strict=True)
        )
