"""Feed-forward layers as memories: a neuron is a key that inputs match, and a value that speaks for tokens.

    f(x) = sum_i m_i v_i        m_i: activation of neuron i, v_i: its column of the output matrix
    top token of a memory = the token whose row of the head has the largest product with sign(m_i) v_i

`memory` is the share of tokens at which the strongest memory of the visit, of the largest |m_i| |v_i|, speaks for the
token that the whole model predicts. `deepen.probe.memories` reads single neurons.

Geva, Schuster, Berant, Levy, Transformer Feed-Forward Layers Are Key-Value Memories, arXiv:2012.14913.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from deepen.errors import FamilyError
from deepen.probe.scores.base import PassScore, Result, column
from deepen.probe.scores.lens import EVERY
from deepen.registry import method

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepen.probe.scores.reading import Reading


@method(
    "memory",
    family="score",
    source="arXiv:2012.14913",
    title="Transformer Feed-Forward Layers Are Key-Value Memories",
    mechanism="share of tokens where the strongest neuron of a visit speaks for the token the model predicts",
    cost="1 pass with the head, and L products of the head with an eighth of the tokens",
)
class Memory(PassScore):
    """Needs a causal head, and feed-forwards with one output matrix; a mixture of experts has none."""

    needs_head = True

    def run(self, reading: Reading) -> Result:
        import torch

        head = head_rows(reading)
        same, counts = np.zeros(reading.depth), np.zeros(reading.depth, dtype=np.int64)
        with torch.inference_mode():
            for ids, first in reading.groups():
                places = torch.arange(first - 1, ids.shape[1] - 1, EVERY, device=ids.device)
                said: dict[int, torch.Tensor] = {}
                with firing(reading, lambda visit, m, v, said=said, places=places: said.update(
                    {visit: strongest(m[:, places], v, head)}
                )):  # fmt: skip
                    predicted = reading.run(ids, head=True, logits_to_keep=places).logits.argmax(-1)
                for visit, tokens in said.items():
                    same[visit] += (tokens == predicted).sum().item()
                    counts[visit] += predicted.numel()
                reading.step(len(ids))
        if not counts.any():
            return Result(note="skipped: no layer of this model has a feed-forward with one output matrix")
        shares = np.where(counts > 0, same / counts.clip(1), np.nan)
        meaning = "share of tokens where the strongest neuron speaks for the prediction"
        return Result((column("memory", shares, "neither", meaning, int(counts.max())),))


def strongest(activation: torch.Tensor, values: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The token that the strongest memory of each token speaks for, [b, k].

    Args:
        activation: [b, k, m].
        values: [m, d].
        head: [vocabulary, d].
    """
    neuron = (activation.abs() * values.norm(dim=-1)).argmax(-1)
    sign = activation.gather(-1, neuron[..., None]).sign()
    return ((sign * values[neuron]).to(head.dtype) @ head.mT).argmax(-1)


def head_rows(reading: Reading) -> torch.Tensor:
    """The rows of the head, one a token of the vocabulary, [vocabulary, d].

    Raises:
        FamilyError: the model has no causal head.
    """
    if not reading.causal:
        raise FamilyError(f"{type(reading.model).__name__} has no causal head, so its memories speak for no token")
    head: Any = reading.model.get_output_embeddings()
    return head.weight.detach()


@contextmanager
def firing(reading: Reading, tell: Any) -> Iterator[None]:
    """Calls `tell(visit, activations [b, t, m], values [m, d])` for each feed-forward of the passes run inside."""
    from torch.nn import Linear

    from deepen.probe.scores.reading import watching

    fired: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        weight: Any = module.weight
        fired[:] = [(args[0], weight.mT if isinstance(module, Linear) else weight)]

    def end(visit: int, before: torch.Tensor, after: torch.Tensor, written: object) -> None:
        if fired:
            activation, values = fired.pop()
            if activation.shape[:-1] == after.shape[:-1] and values.shape == (activation.shape[-1], after.shape[-1]):
                tell(visit, activation, values)

    handles = []
    for layer in reading.visits._modules.values():
        assert layer is not None
        modules = dict(layer.named_modules())
        for name in reading.visits.tower.parts.outputs["f"]:
            if name in modules:
                handles.append(modules[name].register_forward_pre_hook(keep))
    try:
        with watching(reading.visits, end):
            yield
    finally:
        for handle in handles:
            handle.remove()
