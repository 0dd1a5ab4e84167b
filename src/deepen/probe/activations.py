"""Reads a text and keeps, for the linear maps of every layer, what `deepen.narrow` and `deepen.low_rank` need.

    mean of x_j^2         of each value that a linear map reads
    mean of a, of a a'    of the hidden values of each feed-forward
    mean of |a_j dL/da_j|     L: loss of the text, nats summed over tokens

One forward call a batch; with `gradients` a backward call too. Nothing is kept per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepen.errors import DataError, FamilyError
from deepen.probe.scores.reading import Reading, exact, open_reading
from deepen.surgery.activations import Activations

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint


def activations(
    ck: Checkpoint,
    text: str,
    *,
    products: bool = False,
    gradients: bool = False,
    tower: str = "",
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
) -> Activations:
    """Statistics of what every linear map of a tower reads on a text.

    Args:
        ck: the checkpoint.
        text: what to read.
        products: also the products of hidden values, [m, m] for each layer, which compensation needs.
        gradients: also |a_j dL/da_j|, which the Taylor score needs; the model needs a causal head.
        tower: the tower; the empty name means the default one.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.

    Raises:
        FamilyError: no such tower, or gradients of a model without a causal head.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or values are not finite.
    """
    import torch
    from torch.nn.functional import cross_entropy

    reading = open_reading(
        ck, text, tower=tower, context=context, tokens=tokens, batch=batch, device=device, dtype=dtype
    )
    if gradients and not reading.causal:
        raise FamilyError(f"{ck.where}: the Taylor score needs a causal head, and the model has none")
    sums = _Sums(products)
    name = ck.family.tower(tower).name
    seen = 0
    with torch.set_grad_enabled(gradients), _watched(ck, name, reading, sums, gradients):
        for ids, first in reading.groups():
            out = reading.run(ids, head=gradients)
            if gradients:
                logits = out.logits[:, first - 1 : -1].flatten(0, 1).float()
                cross_entropy(logits, ids[:, first:].flatten(), reduction="sum").backward()
            seen += ids.numel()
    found = Activations(
        program=str(ck.program),
        tower=name,
        tokens=seen,
        squares={layer: {path: sums.mean(layer, path) for path in paths} for layer, paths in sums.paths().items()},
        means=sums.means("mean"),
        grams=sums.means("gram"),
        effects=sums.means("effect"),
    )
    if not all(value.isfinite().all() for squares in found.squares.values() for value in squares.values()):
        raise DataError("what the model computes is not finite on this text; compute in --dtype float32")
    return found


class _Sums:
    """Sums over tokens, by layer and by the path of a linear map or the name of a statistic."""

    def __init__(self, products: bool) -> None:
        self.products = products
        self._sums: dict[tuple[int, str], torch.Tensor] = {}
        self._rows: dict[tuple[int, str], int] = {}

    def add(self, layer: int, name: str, total: torch.Tensor, rows: int) -> None:
        """Adds the sum over so many tokens."""
        known = self._sums.get((layer, name))
        self._sums[layer, name] = total if known is None else known + total
        self._rows[layer, name] = self._rows.get((layer, name), 0) + rows

    def mean(self, layer: int, name: str) -> torch.Tensor:
        # A clone, so that what is kept is no tensor of inference mode and lies on the CPU.
        return (self._sums[layer, name] / self._rows[layer, name]).cpu().clone()

    def means(self, name: str) -> dict[int, torch.Tensor]:
        """A statistic of the hidden values, by layer."""
        return {layer: self.mean(layer, each) for layer, each in self._sums if each == name}

    def paths(self) -> dict[int, list[str]]:
        """The linear maps that read something, by layer."""
        found: dict[int, list[str]] = {}
        for layer, name in self._sums:
            if name not in ("mean", "gram", "effect"):
                found.setdefault(layer, []).append(name)
        return found


@contextmanager
def _watched(ck: Checkpoint, tower: str, reading: Reading, sums: _Sums, gradients: bool) -> Iterator[None]:
    """Sums what the linear maps read in the passes run inside; no output changes."""
    from torch import nn

    from deepen.checkpoint.widths import Conv1D

    keys = ck.plan(tower).keys
    flags = [(parameter, parameter.requires_grad) for parameter in reading.model.parameters()]
    handles: list[Any] = []
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        if gradients:
            # The gradient passes through the layers to the embedded text, and to no weight.
            embedding: Any = reading.model.get_input_embeddings()
            handles.append(embedding.register_forward_hook(lambda module, args, out: out.requires_grad_()))
        for child, layer in reading.visits._modules.items():
            assert layer is not None
            number = keys[int(child)].layer
            hidden = _output_path(ck, tower, layer)
            for path, module in layer.named_modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    watch = _watcher(sums, number, path, path == hidden, gradients)
                    handles.append(module.register_forward_pre_hook(watch))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _output_path(ck: Checkpoint, tower: str, layer: Any) -> str | None:
    """The matrix that reads the hidden values of a layer's feed-forward; None where there is not exactly one."""
    from deepen.checkpoint.widths import output_matrix

    try:
        return output_matrix(layer, ck.family.tower(tower).parts, "f", ck.where)
    except FamilyError:
        return None


def _watcher(sums: _Sums, layer: int, path: str, hidden: bool, gradients: bool) -> Any:
    def watch(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        given = args[0]
        read = exact(given.detach()).double().flatten(0, -2)
        sums.add(layer, path, read.square().sum(0), len(read))
        if not hidden:
            return
        sums.add(layer, "mean", read.sum(0), len(read))
        if sums.products:
            sums.add(layer, "gram", read.T @ read, len(read))
        if gradients:
            given.register_hook(
                lambda slope: sums.add(
                    layer, "effect", (exact(slope).double().flatten(0, -2) * read).abs().sum(0), len(read)
                )
            )

    return watch
