"""The parameters that a program owns, as modules: what they compute, and the values they start with.

| kind | tensors | computes | starts with |
|---|---|---|---|
| `lora` | A [r, in], B [out, r] for each linear map | (alpha / r) B A x, alpha = 2 r | A uniform (Kaiming), B = 0 |
| `emb` | value [d] | x + e | e = 0 |
| `norm` | gain [d] | x / rms(x) g | g = 1, which is not the identity |
| `gate=scalar`, `vector` | value [1], [d] | the factor g of x + g (P(x) - x) | g = 1 |
| `gate=token` | weight [d], bias [1] | the factor sigmoid(w x + b), one a token | w = 0, b = 4 |
| `inject=LABEL:concat` | weight [d, 2d] | W [x; s], s the stream at the label | W = [I 0] |

The rank of a matrix is r, at most its smaller side. Shapes: d is the width of the stream.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685; the rest is deepen's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import nn
from torch.nn import functional

from deepen.program import Own

# alpha / r
SCALE = 2.0
EPS = 1e-6
OPEN = 4.0


class Lora(nn.Module):
    """The adapter of one linear map of `reads` to `gives` values."""

    def __init__(self, rank: int, reads: int, gives: int) -> None:
        super().__init__()
        rank = min(rank, reads, gives)
        self.A = nn.Parameter(torch.empty(rank, reads))
        self.B = nn.Parameter(torch.empty(gives, rank))

    def forward(self, x: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
        """[..., in] -> [..., out], what is added to the map's own result, or to some rows of it."""
        read = functional.linear(x.to(self.A.dtype), self.A)
        return (SCALE * functional.linear(read, self.B if rows is None else self.B[rows])).to(x.dtype)

    def update(self) -> torch.Tensor:
        """What is added to the matrix, [out, in]."""
        return SCALE * self.B @ self.A


class Embedding(nn.Module):
    """A vector that is added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value.to(x.dtype)


class Norm(nn.Module):
    """The stream divided by its root mean square, times a gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.gain.to(x.dtype)


class Factor(nn.Module):
    """The same factor for every token, one for the stream or one for each of its values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.to(x.dtype)


class TokenFactor(nn.Module):
    """A factor that each token decides, [..., d] -> [..., 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(functional.linear(x, self.weight[None].to(x.dtype), self.bias.to(x.dtype)))


class Joined(nn.Module):
    """A linear map of the stream beside a recorded one, [..., 2d] -> [..., d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


def branches(modules: Mapping[str, nn.Module]) -> nn.Module:
    """One module with others at dotted paths below it."""
    root = nn.Module()
    for path, module in modules.items():
        *above, name = path.split(".")
        at = root
        for step in above:
            if step not in at._modules:
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        at.add_module(name, module)
    return root


def stream_module(own: Own, width: int) -> nn.Module | None:
    """The module of a set other than `lora`; None where it has no parameters."""
    match own.kind, own.value:
        case "emb", _:
            return Embedding(width)
        case "norm", _:
            return Norm(width)
        case "gate", "token":
            return TokenFactor(width)
        case "gate", kind:
            return Factor(1 if kind == "scalar" else width)
        case "inject", (_, "concat"):
            return Joined(width)
        case _:
            return None


def start(tensor: torch.Tensor, name: str, generator: torch.Generator | None = None) -> None:
    """Gives a tensor of a set, called such as `gate.0.1.bias`, the value that it starts with."""
    kind, leaf = name.split(".")[0], name.rpartition(".")[2]
    with torch.no_grad():
        tensor.zero_()
        if kind == "lora" and leaf == "A":
            bound = 1 / sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)
        elif (kind, leaf) in (("norm", "gain"), ("gate", "value")):
            tensor.fill_(1.0)
        elif (kind, leaf) == ("gate", "bias"):
            tensor.fill_(OPEN)
        elif kind == "inject":
            tensor.fill_diagonal_(1.0)
