"""Why a run ends early: a signal, or numbers that are not finite.

A signal never interrupts an update: the step that is under way is finished, its state saved, and then the run ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepen.errors import DeepenError


class Stopped(DeepenError):
    """A run that was asked to end; what was trained so far is saved where the message says."""


class NotFinite(DeepenError):
    """A loss or a gradient that is NaN or infinite; the weights are those before the step."""


@contextmanager
def signals() -> Iterator[list[int]]:
    """Yields a list that a first SIGTERM or SIGINT is put in; a second one acts as it would have without this.

    Python lets only the main thread take signals; in any other the list stays empty.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: Any) -> None:
        came.append(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        restore()


def first_output(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The first module of a forward pass whose output is not finite, innermost first; None where all are.

    Args:
        model: the model, whose modules are watched.
        run: runs the pass.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _given: Any, output: Any) -> None:
            if not found and not all(map(_finite, tensors(output))):
                found.append(name)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_gradient(model: nn.Module) -> str | None:
    """The parameter whose gradient is the first that is not finite; a backward pass meets the last parameter first."""
    bad = [name for name, each in model.named_parameters() if each.grad is not None and not _finite(each.grad)]
    return bad[-1] if bad else None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a module returns: itself, or those in a tuple, a list or a mapping."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
