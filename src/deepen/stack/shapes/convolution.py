"""A convolution with its norm, in the two orders, and their counts.

    Unit            x ── conv ── BN ── [relu]
    Preactivated    x ── BN ── relu ── conv

Convolutions have no bias, since a norm follows or a later one absorbs it, and keep the size of an image up to their
stride. BN: Ioffe and Szegedy, arXiv:1502.03167.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution without a bias, (B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def weights(inputs: int, outputs: int, kernel: int = 3) -> int:
    """Parameters of a convolution."""
    return inputs * outputs * kernel * kernel


def unit(inputs: int, outputs: int, kernel: int = 3) -> int:
    """Parameters of a `Unit`."""
    return weights(inputs, outputs, kernel) + 2 * outputs


class Unit(nn.Module):
    """Convolution, norm and, unless told otherwise, relu."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, relu: bool = True) -> None:
        super().__init__()
        self.conv = convolution(inputs, outputs, kernel, stride)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        y = self.norm(self.conv(x))
        return F.relu(y) if self.relu else y


class Preactivated(nn.Module):
    """Norm, relu and convolution."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = convolution(inputs, outputs, kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W)."""
        return self.conv(F.relu(self.norm(x)))
