"""AdamW over two groups of parameters: with weight decay, and norms and biases without.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import torch
from torch import nn

from deepen.errors import UsageError
from deepen.train.recipe import Recipe

# Where torch has one kernel for the whole update.
FUSED = ("cpu", "cuda")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name; one that several modules share is there once.

    Raises:
        UsageError: there is none.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise UsageError("no parameter is left to train; select at least one layer")
    return found


def groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The trained parameters that decay, and those that do not: norms, biases, all that is not a matrix, n-grams."""
    kept = set[int]()
    for module in model.modules():
        whole = "norm" in type(module).__name__.lower() or not getattr(module, "decays", True)
        for name, parameter in module.named_parameters(recurse=False):
            exempt = whole or name.endswith("bias") or parameter.ndim < 2
            # what state-space layers say of their own matrices
            if exempt or getattr(parameter, "_no_weight_decay", False):
                kept.add(id(parameter))
    everything = trained(model)
    decayed = {name: parameter for name, parameter in everything.items() if id(parameter) not in kept}
    plain = {name: parameter for name, parameter in everything.items() if id(parameter) in kept}
    placed = [id(parameter) for parameter in (*decayed.values(), *plain.values())]
    assert sorted(placed) == sorted({id(parameter) for parameter in everything.values()})
    return decayed, plain


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """The optimiser of a run; its learning rate is set at every step."""
    decayed, plain = groups(model)
    devices = {parameter.device.type for parameter in (*decayed.values(), *plain.values())}
    return torch.optim.AdamW(
        [
            {"params": list(decayed.values()), "weight_decay": recipe.weight_decay},
            {"params": list(plain.values()), "weight_decay": 0.0},
        ],
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=devices <= set(FUSED),
    )
