"""The plain feed-forward: y = W_down gelu(W_up u + b) + b.

Source: Vaswani et al., arXiv:1706.03762; GELU: Hendrycks and Gimpel, arXiv:1606.08415.
"""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn import functional as F

from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.linear import linear


class GELU(nn.Module):
    """A feed-forward of hidden width `hidden`.

    Args:
        width: D.
        hidden: the width between the two maps.
        bias: whether both maps have one.
        approximate: `tanh`, as in GPT-2, or `none`.
    """

    def __init__(
        self, width: int, hidden: int, *, bias: bool = False, approximate: Literal["tanh", "none"] = "tanh"
    ) -> None:
        super().__init__()
        self.approximate: Literal["tanh", "none"] = approximate
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, read: Read, context: Context) -> Out:
        hidden = F.gelu(linear(self, "up", read.u, context), approximate=self.approximate)
        return Out(linear(self, "down", hidden, context))
