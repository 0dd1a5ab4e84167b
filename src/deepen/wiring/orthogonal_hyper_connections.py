"""Orthogonal Hyper-Connections (oHC): four streams rotated by a pair of unit quaternions.

    X' = mix X + post^T F(norm(pre X))          X: (4, D) a token; each channel is a quaternion v
    q = unit(1 + l0, l1, l2, l3)   r = unit(1 + l4, l5, l6, l7)
    mix = L(q) R(conj r), which is v -> q v conj(r)

    X_1 ─┬────────┬── rotate ── + (post_1 y) ── X'_1
    ...  │  pre   │    ...        ...            ...
    X_4 ─┴── u    └── rotate ── + (post_4 y) ── X'_4      y = F(norm(u))

Logits of 0 give the identity, bit for bit. A rotation keeps the length of the streams, but moves energy between their
mean and their differences, which mHC cannot. The scale of the logits is not learned; its value, 0.01, is a choice (R),
as are the initial maps and the readout. `pre` and `post` are in `gated_streams.py`.

Source: Guo et al., Orthogonal Hyper-Connections, arXiv:2609.02672.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from deepen.registry import method
from deepen.wiring.base import Shape
from deepen.wiring.gated_streams import GatedStreams

# Below this length a quaternion is divided by it, not by its own.
SHORT = 1e-6


def rotation(logits: torch.Tensor) -> torch.Tensor:
    """The rotations (..., 4, 4) of logits (..., 8)."""
    one = torch.zeros_like(logits[..., :4])
    one[..., 0] = 1
    q, r = (unit(one + part) for part in logits.split(4, dim=-1))
    conjugate = torch.cat([r[..., :1], -r[..., 1:]], dim=-1)
    return left(q) @ right(conjugate)


def unit(quaternion: torch.Tensor) -> torch.Tensor:
    """The quaternions (..., 4) at length 1."""
    return quaternion / quaternion.norm(dim=-1, keepdim=True).clamp_min(SHORT)


def left(p: torch.Tensor) -> torch.Tensor:
    """The matrix (..., 4, 4) of v -> p v."""
    a, b, c, d = p.unbind(-1)
    return torch.stack([a, -b, -c, -d, b, a, -d, c, c, d, a, -b, d, -c, b, a], dim=-1).unflatten(-1, (4, 4))


def right(p: torch.Tensor) -> torch.Tensor:
    """The matrix (..., 4, 4) of v -> v p."""
    a, b, c, d = p.unbind(-1)
    return torch.stack([a, -b, -c, -d, b, a, d, -c, c, -d, a, b, d, c, -b, a], dim=-1).unflatten(-1, (4, 4))


@method(
    "orthogonal-hyper-connections",
    family="wiring",
    source="arXiv:2609.02672",
    title="Orthogonal Hyper-Connections",
    mechanism="four streams, rotated by unit quaternions; bounded read and write weights",
    cost="88 multiply-adds a channel and site; four streams are kept",
)
class OrthogonalHyperConnections(GatedStreams):
    """Four streams mixed by rotations.

    Args:
        shape: what it is built for.
        readout: what of the streams the final norm sees.
    """

    equals = "Pre-LN: all streams stay equal"
    dead: ClassVar[Mapping[str, str]] = {
        "read_bias.0": "before the first site all streams are equal, and the norm takes the size of their sum away",
    }
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the equations and both matrices",
        "N": "the equality with Pre-LN, orthogonality, the product of quaternions",
        "R": "initial maps, the fixed scale, the readout",
    }

    def __init__(self, shape: Shape, *, readout: Literal["mean", "sum"] = "mean") -> None:
        super().__init__(shape, 4, 8, scaled=False, readout=readout)

    def matrix(self, logits: torch.Tensor) -> torch.Tensor:
        return rotation(logits)
