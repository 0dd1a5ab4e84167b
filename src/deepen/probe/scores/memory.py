"""Feed-forward layers as memories: a neuron is a key that inputs match, and a value that speaks for tokens.

    f(x) = sum_i m_i v_i        m_i: activation of neuron i, v_i: its column of the output matrix
    top token of a memory = the token whose row of the head has the largest product with sign(m_i) v_i

`memory` is the share of tokens at which the strongest memory of the visit, of the largest |m_i| |v_i|, speaks for the
token that the whole model predicts. `memories` lists single neurons: what makes them fire, and what they speak for.

Geva, Schuster, Berant, Levy, Transformer Feed-Forward Layers Are Key-Value Memories, arXiv:2012.14913.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepen.errors import FamilyError, UsageError
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


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """One memory.

    Attributes:
        visit: the visit it belongs to.
        neuron: its number in the feed-forward.
        speaks: the tokens its value has the largest products with, for the sign of its largest activation.
        fires: the texts that end with the tokens of its largest activations, and these.
    """

    visit: int
    neuron: int
    speaks: tuple[str, ...]
    fires: tuple[tuple[str, float], ...]

    def to_json(self) -> dict[str, Any]:
        return {"visit": self.visit, "neuron": self.neuron, "speaks": self.speaks, "fires": self.fires}


def memories(reading: Reading, visit: int, neurons: int = 5, top: int = 5, before: int = 8) -> list[Neuron]:
    """The neurons of one visit with the largest |m_i| |v_i| anywhere in the text, strongest first.

    Args:
        reading: what to read; it needs a head.
        visit: the visit to look at.
        neurons: how many neurons.
        top: how many tokens and texts of each.
        before: tokens of context shown with a text, the one that fires included.

    Raises:
        UsageError: no such visit.
        FamilyError: the model has no head, or the visit no feed-forward with one output matrix.
    """
    import torch

    if not 0 <= visit < reading.depth:
        raise UsageError(f"visit {visit} does not exist; the program has {reading.depth}: 0-{reading.depth - 1}")
    head = head_rows(reading)
    # of each neuron its largest activations so far, the number of their token, and the values
    best = place = values = None
    windows: list[list[int]] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.inference_mode(), firing(reading, lambda at, m, v: seen.append((m, v)) if at == visit else None):
        for ids, _ in reading.groups():
            reading.run(ids)
            if not seen:
                break
            activation, values = seen.pop()
            tokens = activation.flatten(0, 1).float()
            at = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
            at = at + sum(map(len, windows))
            windows += ids.tolist()
            if best is not None and place is not None:
                tokens, at = torch.cat((best, tokens)), torch.cat((place, at))
            order = tokens.abs().topk(min(top, len(tokens)), 0).indices
            best, place = tokens.gather(0, order), at.gather(0, order)
            reading.step(len(ids))
        if best is None or place is None or values is None:
            raise FamilyError(f"visit {visit} has no feed-forward with one output matrix, so it has no such memories")
        chosen = (best[0].abs() * values.float().norm(dim=-1)).topk(min(neurons, best.shape[1])).indices.tolist()
        return [
            Neuron(
                visit=visit,
                neuron=neuron,
                speaks=tuple(
                    str(reading.tokenizer.decode([token]))
                    for token in (head @ (best[0, neuron].sign() * values[neuron]).to(head.dtype)).topk(top)[1].tolist()
                ),
                fires=tuple(
                    (_text(reading, windows, at, before), size)
                    for at, size in zip(place[:, neuron].tolist(), best[:, neuron].tolist(), strict=True)
                ),
            )
            for neuron in chosen
        ]


def _text(reading: Reading, windows: list[list[int]], at: int, before: int) -> str:
    """The text of the tokens up to number `at` of all that were read, no more than `before` and of its window."""
    for ids in windows:
        if at < len(ids):
            return str(reading.tokenizer.decode(ids[max(0, at + 1 - before) : at + 1]))
        at -= len(ids)
    raise AssertionError("a token beyond the text")


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
