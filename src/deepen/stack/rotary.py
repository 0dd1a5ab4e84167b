"""Tables of rotary positions."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn


class Rotary(nn.Module):
    """cos and sin of position x base^(-2i / d); the table grows with the longest position seen.

    Args:
        head_width: d.
        base: of the frequencies.
    """

    def __init__(self, head_width: int, base: float) -> None:
        super().__init__()
        self.head_width, self.base = head_width, base
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, start: int, length: int, positions: torch.Tensor | None, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin, each (T, 1, d) or (B, T, 1, d), for `length` positions from `start`, or for given ones (B, T).

        `sin` has the sign of the first half of a head: x cos + roll(x, d / 2) sin is the rotation.
        """
        if positions is not None:
            return self._compute(positions.to(like.device).float(), like)
        end = start + length
        table = self.table
        if table is None or table[0].shape[0] < end or table[0].dtype != like.dtype or table[0].device != like.device:
            room = end if torch.compiler.is_compiling() else max(end, 256, 2 * start)
            # a table that is made while generating serves training too
            with torch.inference_mode(False) if not torch.compiler.is_compiling() else nullcontext():
                table = self._compute(torch.arange(room, device=like.device).float(), like)
            if not torch.compiler.is_compiling():
                self.table = table
        return table[0][start:end], table[1][start:end]

    def _compute(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.head_width, 2, device=positions.device).float() / self.head_width
        angles = positions[..., None] * self.base**-half
        cos, sin = angles.cos(), angles.sin()
        joined = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return joined[0].unsqueeze(-2).to(like.dtype), joined[1].unsqueeze(-2).to(like.dtype)
