"""The gated feed-forward: y = W_down (silu(W_gate u) * W_up u).

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.linear import linear


class SwiGLU(nn.Module):
    """A gated feed-forward of hidden width `hidden`; one matrix holds the rows of the gate and of the values."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, read: Read, context: Context) -> Out:
        gate, value = linear(self, "up", read.u, context).chunk(2, dim=-1)
        return Out(linear(self, "down", F.silu(gate) * value, context))
