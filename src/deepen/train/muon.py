"""Muon for the matrices of the layers, AdamW for everything else, as one optimiser.

    buffer = m buffer + (1 - m) g        u = (1 - m) g + m buffer        O = U V^T of u, by Newton and Schulz
    W      = W - rate decay W - 0.2 sqrt(max(rows, columns)) rate O

The factor makes the update as large as one of AdamW, so both take one rate. On a GPU this is `torch.optim.Muon`, which
computes O in bfloat16; CPUs are slow at that, and compute it in single precision here.

Sources: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for
LLM Training, arXiv:2502.16982 (the factor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepen.stack.stack import Stack
from deepen.train.groups import parameter_groups
from deepen.train.optim import FUSED
from deepen.train.recipe import Recipe

# a X + b (X X^T) X + c (X X^T)^2 X
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
TURNS = 5
MOMENTUM = 0.95


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of a matrix U S V^T: singular values between 0.7 and 1.3 where they were not tiny."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(TURNS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class CpuMuon(torch.optim.Muon):
    """`torch.optim.Muon` in single precision."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One update; a closure is not taken."""
        assert closure is None
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - momentum)
                update = orthogonal(parameter.grad.lerp(buffer, momentum))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))
        return None


class Mixed(torch.optim.Optimizer):
    """Several optimisers over parts of one model, with one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # the very tables of the parts, so that a rate or a state that is set here is theirs
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One update of every part; a closure is not taken."""
        assert closure is None
        for part in self.parts:
            part.step()
        return None


def matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """The matrices of the linear maps in the layers of the stacks of a model."""
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for module in stack.layers.modules():
            if isinstance(module, nn.Linear):
                yield module.get_parameter("weight")


def optimiser_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW, or with Muon where the recipe says so; every trained parameter is in exactly one group."""
    kinds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    by_muon = {id(each) for each in matrices(model)} if getattr(recipe, "optimiser", "adamw") == "muon" else set[int]()
    groups = parameter_groups(model, lr=recipe.lr, weight_decay=recipe.weight_decay, eps=recipe.eps)
    for group in groups:
        for muon in (False, True):
            named = [
                pair for pair in zip(group["params"], group["names"], strict=True) if (id(pair[0]) in by_muon) == muon
            ]
            if named:
                params, names = zip(*named, strict=True)
                kinds[muon].append({**group, "params": list(params), "names": list(names)})
    placed = [id(each) for kind in kinds.values() for group in kind for each in group["params"]]
    assert sorted(placed) == sorted({id(each) for group in groups for each in group["params"]})
    parts: list[torch.optim.Optimizer] = []
    devices = {each.device.type for group in groups for each in group["params"]}
    if kinds[False]:
        # names are for those who read the groups
        plain = [{name: value for name, value in group.items() if name != "names"} for group in kinds[False]]
        parts.append(
            torch.optim.AdamW(plain, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), fused=devices <= set(FUSED))
        )
    if kinds[True]:
        # eps of a group is that of AdamW
        plain = [{name: group[name] for name in ("params", "lr", "weight_decay", "factor")} for group in kinds[True]]
        kind = CpuMuon if devices == {"cpu"} else torch.optim.Muon
        parts.append(kind(plain, lr=recipe.lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"))
    return parts[0] if len(parts) == 1 else Mixed(parts)
