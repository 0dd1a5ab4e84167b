"""The attention of a trained stack is replaced by shallow feed-forwards, layer by layer, by distillation.

    teacher:  input of the mixer, output of the mixer     one pair for each visit of each layer
    student:  min over its parameters of |student(input) - output|^2, each layer by itself

Nothing but the mixers changes: embeddings, norms, feed-forwards, wiring and program are the teacher's.

Source: Bozic et al., Rethinking Attention, arXiv:2311.10642.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepen.errors import DataError, UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Context, Out, Read


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """What a replacement gives.

    Attributes:
        stack: with the shallow mixers.
        errors: of each layer of the bank, the mean square error over that of a mixer that gives zeros, on the last
            batch; None for a layer that no visit runs.
    """

    stack: Stack
    errors: tuple[float | None, ...]


def replace_attention(
    teacher: Stack, batches: Iterable[torch.Tensor], *, inner: int = 256, lr: float = 1e-3, seed: int = 0
) -> Replaced:
    """A stack like the teacher whose mixers are shallow feed-forwards that do what its attention did.

    Args:
        teacher: a trained stack; it stays as it is.
        batches: inputs of the teacher, one for each step.
        inner: width between the maps of a mixer.
        lr: of Adam.
        seed: of the initial values.

    Raises:
        UsageError: a learning rate that is not positive, or a teacher whose windows a shallow mixer has not.
        DataError: no batch.
    """
    if lr <= 0:
        raise UsageError(f"replace_attention: the learning rate is more than 0, got {lr:g}")
    table = {"name": "shallow-mixer", "inner": inner}
    config = StackConfig.read({**teacher.config.model_dump(mode="json"), "mixer": table})
    student = Stack(config, seed=seed).to(next(teacher.parameters()))
    own = {name for name in student.state_dict() if ".a.sublayer." in name}
    rest = {name: value for name, value in teacher.state_dict().items() if ".a.sublayer." not in name}
    found: Any = student.load_state_dict(rest, strict=False)
    assert set(found.missing_keys) == own
    assert not found.unexpected_keys
    mixers: list[Any] = [layer.get_submodule("a.sublayer") for layer in student.layers]
    parameters = [parameter for mixer in mixers for parameter in mixer.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=lr)
    errors: list[float | None] | None = None
    for batch in batches:
        errors = []
        losses = []
        for mixer, pairs in zip(mixers, _pairs(teacher, batch), strict=True):
            wrong, whole = [], []
            for read, context, y in pairs:
                wrong.append((mixer(read, context).y - y).square().mean())
                whole.append(y.square().mean())
            losses += wrong
            errors.append(float(sum(wrong).detach() / sum(whole)) if pairs else None)  # pyright: ignore
        optimiser.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        optimiser.step()
    if errors is None:
        raise DataError("replace_attention: no batch to distil from; give one or more")
    return Replaced(stack=student.train(teacher.training), errors=tuple(errors))


@torch.no_grad()
def _pairs(teacher: Stack, batch: torch.Tensor) -> list[list[tuple[Read, Context, torch.Tensor]]]:
    """What the mixer of each layer read and gave, one pair for each visit."""
    found: list[list[tuple[Read, Context, torch.Tensor]]] = [[] for _ in teacher.layers]

    def keep(index: int) -> Any:
        def hook(_: Any, inputs: tuple[Read, Context], out: Out) -> None:
            read, context = inputs
            found[index].append((read, context._replace(slot=None, adapters={}), out.y))

        return hook

    taken = [
        layer.get_submodule("a.sublayer").register_forward_hook(keep(index))
        for index, layer in enumerate(teacher.layers)
    ]
    try:
        teacher(batch, last=0)
    finally:
        for each in taken:
            each.remove()
    return found
