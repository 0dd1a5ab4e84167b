"""What an optimiser is told of each parameter: rate, weight decay and eps, by the parametrisation of its stack.

    lr = base lr * factor        weight_decay = base * multiplier, 0 for norms and biases        eps = base * multiplier

A schedule sets `group["lr"] = rate * group["factor"]`. Parameters outside of stacks have multipliers of 1.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from deepen.stack.parametrisation import Record, records
from deepen.stack.stack import Stack
from deepen.train.optim import groups, trained


def parameter_groups(stack: nn.Module, *, lr: float, weight_decay: float, eps: float = 1e-8) -> list[dict[str, Any]]:
    """Groups for an optimiser; each trained parameter is in exactly one of them.

    Args:
        stack: a stack, or a module that holds some.
        lr: the learning rate that multipliers belong to.
        weight_decay: of what decays, likewise.
        eps: likewise.

    Returns:
        Of each group `params`, their `names`, `lr`, `weight_decay`, `eps`, and `factor`, the multiplier of the rate.

    Raises:
        UsageError: no parameter is left to train.
    """
    found = _records(stack)
    decayed, plain = groups(stack)
    made: dict[tuple[float, float, float], dict[str, Any]] = {}
    for named, decay in ((decayed, weight_decay), (plain, 0.0)):
        for name, parameter in named.items():
            record = found.get(id(parameter), Record())
            key = (record.lr, decay * record.weight_decay, eps * record.eps)
            group = made.setdefault(
                key,
                {"params": [], "names": [], "lr": lr * key[0], "weight_decay": key[1], "eps": key[2], "factor": key[0]},
            )
            group["params"].append(parameter)
            group["names"].append(name)
    placed = [id(parameter) for group in made.values() for parameter in group["params"]]
    assert sorted(placed) == sorted(id(parameter) for parameter in trained(stack).values())
    return list(made.values())


def _records(model: nn.Module) -> dict[int, Record]:
    """The multipliers of parameters, by their identity: a stack may lie inside of something else."""
    found: dict[int, Record] = {}
    for module in model.modules():
        if isinstance(module, Stack):
            parameters = dict(module.named_parameters())
            found |= {id(parameters[name]): record for name, record in records(module).items()}
    return found
