"""Which keys a query sees: causality, windows, padding and tokens of a cache."""

from __future__ import annotations

import torch


class PassMasks:
    """The masks of one forward pass, each made once.

    Args:
        new: tokens of the pass.
        past: tokens before them in the cache.
        causal: whether a token sees only itself and those before it.
        valid: (B, past + new), which tokens are no padding; None when all are.
        device: of the masks.
    """

    def __init__(self, new: int, past: int, causal: bool, valid: torch.Tensor | None, device: torch.device) -> None:
        self.new, self.past, self.causal, self.valid, self.device = new, past, causal, valid, device
        self.made: dict[int | None, tuple[torch.Tensor | None, bool]] = {}

    def __call__(self, window: int | None) -> tuple[torch.Tensor | None, bool]:
        """The boolean mask (B or 1, 1, new, past + new) for a window, and whether the plain causal kernel is right."""
        if window is not None and window >= self.past + self.new:
            window = None
        if window not in self.made:
            self.made[window] = self._make(window)
        return self.made[window]

    def _make(self, window: int | None) -> tuple[torch.Tensor | None, bool]:
        plain = window is None and self.valid is None
        if plain and (not self.causal or self.new == 1):
            return None, False
        if plain and self.past == 0:
            return None, True
        keys = torch.arange(self.past + self.new, device=self.device)
        behind = keys[self.past :, None] - keys
        seen = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if window is not None:
            seen = seen & (behind < window) & (behind > -window)
        mask = seen[None, None]
        if self.valid is not None:
            # A padding token sees itself, so that its row is defined; nobody sees it.
            mask = mask & self.valid[:, None, None, :] | (behind == 0)
        return mask, False
