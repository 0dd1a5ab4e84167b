"""What stands between the two maps of a feed-forward: an activation, or a gate.

    plain  h = f(W_up u)                       W_up [H, D]
    gated  h = f(W_gate u) * W_value u         W_up [2 H, D], the rows of the gate first

A gated form has three matrices where a plain one has two, so 2/3 of the hidden width makes their parameters and
products equal: 8/3 D against 4 D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

Name = Literal["glu", "bilinear", "reglu", "geglu", "swiglu", "relu", "gelu", "squared-relu"]


class Form(NamedTuple):
    """An activation, and whether it gates.

    Attributes:
        gated: whether half of the rows of the first map are a gate.
        function: the activation; of the GELU with the form that the configuration names.
    """

    gated: bool
    function: Callable[[torch.Tensor, str], torch.Tensor]

    @property
    def times(self) -> float:
        """The usual hidden width over D."""
        return 8 / 3 if self.gated else 4.0

    def rows(self, hidden: int) -> int:
        """Rows of the first map."""
        return 2 * hidden if self.gated else hidden

    def __call__(self, rows: torch.Tensor, gelu: str) -> torch.Tensor:
        """The hidden values (..., H) of what the first map gives, (..., rows)."""
        if not self.gated:
            return self.function(rows, gelu)
        gate, value = rows.chunk(2, dim=-1)
        return self.function(gate, gelu) * value


def _gelu(x: torch.Tensor, gelu: str) -> torch.Tensor:
    return F.gelu(x, approximate=gelu)


FORMS: dict[Name, Form] = {
    "glu": Form(True, lambda x, _: torch.sigmoid(x)),
    "bilinear": Form(True, lambda x, _: x),
    "reglu": Form(True, lambda x, _: F.relu(x)),
    "geglu": Form(True, _gelu),
    "swiglu": Form(True, lambda x, _: F.silu(x)),
    "relu": Form(False, lambda x, _: F.relu(x)),
    "gelu": Form(False, _gelu),
    "squared-relu": Form(False, lambda x, _: F.relu(x).square()),
}
