"""EUGen: the first map of a feed-forward with its activation, as a polynomial in random projections.

    u+ ── G_ij ── product over j ── Phi_i ──╮
    w+ ── G_ij ── product over j ── Psi_i ── . ── * a_i / m ── sum over i ── h ── W_down ── y

    u+ = [u ; 1 ; |u|]    w+ = [w ; b ; s], a row of the first map

    Phi_i(u+) = product over j = 1..i of (G_ij u+), m values; Psi_i(w+) the same of the row, with the same G

Rows of G have zero mean and the identity as covariance and are independent over j, so that h is a polynomial of
w+ . u+ in the mean: sum of a_i (w+ . u+)^i. Its coefficients a are the least squares fit to the activation over a
range. The variance falls as 1 / m; blocks of orthogonal rows make it smaller. G is trained too.

In inference the rows are known: `fold` gives y = V [Phi_1 .. Phi_k] + c, whose cost has no H in it; `distilled` fits V
to inputs and outputs of a trained layer by ridge regression, without gradients.

Source: Kim et al., EUGens: Efficient, Unified, and General Dense Layers, arXiv:2601.22563.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.registry import method
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.linear import linear

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu,
}  # fmt: skip
RIDGE = 1e-5


def projections(order: int, features: int, width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The matrices G_ij, (k (k + 1) / 2, m, d): blocks of orthogonal rows of length sqrt(d)."""
    blocks = -(-features // width)
    drawn = torch.randn(order * (order + 1) // 2, blocks, width, width, dtype=dtype)
    q, r = torch.linalg.qr(drawn)
    # the signs make q uniform over orthogonal matrices
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return sqrt(width) * q.flatten(1, 2)[:, :features]


def features(x: torch.Tensor, maps: torch.Tensor, order: int) -> torch.Tensor:
    """[Phi_1 .. Phi_k]: x (n, d), maps (k (k + 1) / 2, m, d) -> (n, k m)."""
    mapped = F.linear(x, maps.flatten(0, 1)).unflatten(1, maps.shape[:2])
    pieces = mapped.split(list(range(1, order + 1)), dim=1)
    return torch.cat([piece.prod(1) for piece in pieces], dim=1)


def augmented(u: torch.Tensor) -> torch.Tensor:
    """[u ; 1 ; |u|]: (..., D) -> (..., D + 2)."""
    return torch.cat([u, torch.ones_like(u[..., :1]), torch.linalg.vector_norm(u, dim=-1, keepdim=True)], dim=-1)


def fitted(activation: str, order: int, span: float) -> tuple[float, ...]:
    """a_0 .. a_k: the polynomial nearest to an activation on [-span, span], by least squares."""
    z = torch.linspace(-span, span, 2001, dtype=torch.float64, device="cpu")
    powers = torch.stack([z**i for i in range(order + 1)], dim=1)
    return tuple(torch.linalg.lstsq(powers, ACTIVATIONS[activation](z).unsqueeze(1)).solution.flatten().tolist())


class Folded(nn.Module):
    """y = V [Phi_1 .. Phi_k](u+) + c, which no longer knows the rows of the layer.

    Args:
        maps: G, (k (k + 1) / 2, m, D + 2).
        order: k.
        matrix: V, (D, k m).
        constant: c, (D,).
    """

    def __init__(self, maps: torch.Tensor, order: int, matrix: torch.Tensor, constant: torch.Tensor) -> None:
        super().__init__()
        self.order = order
        self.maps, self.matrix, self.constant = (
            nn.Parameter(each.detach().clone()) for each in (maps, matrix, constant)
        )

    def forward(self, read: Read, context: Context) -> Out:
        flat = features(augmented(read.u).flatten(0, -2), self.maps, self.order)
        return Out(F.linear(flat, self.matrix, self.constant).view_as(read.u))


def distilled(
    maps: torch.Tensor, order: int, inputs: torch.Tensor, outputs: torch.Tensor, *, ridge: float = RIDGE
) -> Folded:
    """The layer with these projections that is nearest to pairs of inputs and outputs, both (n, D).

    Args:
        maps: G, (k (k + 1) / 2, m, D + 2).
        order: k.
        inputs: of the trained layer.
        outputs: of the trained layer.
        ridge: added to the diagonal of the normal equations.

    Raises:
        UsageError: a negative ridge, or inputs and outputs that are not pairs.
    """
    if ridge < 0 or inputs.shape[:1] != outputs.shape[:1]:
        raise UsageError(
            f"distilled: needs a ridge of 0 or more and as many outputs as inputs, got {ridge:g}, {len(inputs)} inputs "
            f"and {len(outputs)} outputs"
        )
    with torch.no_grad():
        phi = features(augmented(inputs).double(), maps.double(), order)
        phi = torch.cat([phi, phi.new_ones(len(phi), 1)], dim=1)
        gram = phi.T @ phi + ridge * torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device)
        found = torch.linalg.solve(gram, phi.T @ outputs.double()).to(inputs.dtype)
    return Folded(maps.to(inputs.dtype), order, found[:-1].T, found[-1])


@method(
    "eugen",
    family="ffn",
    source="arXiv:2601.22563",
    title="EUGens: Efficient, Unified, and General Dense Layers",
    mechanism="y = W_down h, h a polynomial of the first map estimated from m random projections of input and rows",
    cost="k (k + 1) / 2 m D for a token and m k D folded; in training also m k (D + H) of the rows",
)
class EUGen(FeedForward):
    """A polynomial first map in m random features of each order, and a second map.

    Args:
        sizes: what it is built from.
        order: k.
        features: m.
        activation: what the polynomial is fitted to.
        span: half of the range of the fit.
    """

    equals: ClassVar[str] = "two linear maps with order 1, m = D + 2 and the identity as activation"
    marks: ClassVar[Mapping[str, str]] = {
        "C": "the features, their scaling by 1 / m, orthogonal blocks, ridge distillation",
        "N": "the mean over draws of G is the polynomial, for orders 1 to 3; folded equals unfolded; order 1 with "
        "m = D + 2 is linear",
        "R": "the fit of coefficients by least squares; the norm of the input beside a 1, of which sources have either",
    }  # fmt: skip

    def __init__(
        self,
        sizes: Sizes,
        *,
        order: Annotated[int, Field(ge=1, le=4)] = 2,
        features: Annotated[int, Field(ge=1)] = 64,
        activation: Literal["identity", "relu", "gelu", "silu"] = "gelu",
        span: Annotated[float, Field(gt=0)] = 3.0,
    ) -> None:
        super().__init__(sizes)
        self.order, self.features = order, features
        self.coefficients = fitted(activation, order, span)
        self.maps = nn.Parameter(torch.empty(order * (order + 1) // 2, features, sizes.width + 2))
        self.up = nn.Parameter(torch.empty(sizes.hidden, sizes.width + 2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=sizes.bias)

    def reset(self) -> None:
        super().reset()
        with torch.no_grad():
            self.maps.copy_(projections(self.order, self.features, self.sizes.width + 2))

    def forward(self, read: Read, context: Context) -> Out:
        phi = features(augmented(read.u).flatten(0, -2), self.maps, self.order)
        hidden = F.linear(phi, self.rows()) + self.coefficients[0]
        return Out(linear(self, "down", hidden, context).view_as(read.u))

    def rows(self) -> torch.Tensor:
        """[a_1 Psi_1 .. a_k Psi_k] / m of the rows of the first map: (H, k m)."""
        scale = torch.tensor(self.coefficients[1:], dtype=self.up.dtype, device=self.up.device) / self.features
        return features(self.up, self.maps, self.order) * scale.repeat_interleave(self.features)

    def fold(self) -> Folded:
        """The same function without the hidden values."""
        with torch.no_grad():
            constant = self.coefficients[0] * self.down.weight.sum(1)
            bias = 0.0 if self.down.bias is None else self.down.bias
            return Folded(self.maps, self.order, self.down.weight @ self.rows(), constant + bias)

    def matrices(self) -> Iterator[torch.Tensor]:
        yield from (self.up, self.down.weight)

    def flops(self, tokens: int) -> float:
        mapped = (tokens + self.sizes.hidden) * self.maps.numel()
        return 2.0 * (mapped + tokens * self.sizes.hidden * (self.order * self.features + self.sizes.width))
