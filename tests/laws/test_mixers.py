"""Every registered mixer, with its options, under the laws: in a loop, under three wirings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepen.registry import lookup, methods
from deepen.stack.cost import stack_cost
from tests.laws import ffn_laws as laws
from tests.laws.ffn_laws import WIRINGS, Case, stack_of
from tests.laws.wiring_laws import tokens

MIXERS: dict[str, dict[str, Any]] = {
    "softmax-attention": {"mixer": {"name": "softmax-attention", "scale": 0.3}},
    "softmax-attention-qk": {"mixer": "softmax-attention", "qk_norm": True, "qkv_bias": True, "bias": True},
    "all-attention": {"mixer": {"name": "all-attention", "memories": 5, "scale": 0.3}, "qk_norm": True},
    "shallow-mixer": {"mixer": {"name": "shallow-mixer", "inner": 6}, "window": None, "context": 12},
}
CASES = {name: Case("swiglu", fields=fields) for name, fields in MIXERS.items()}


def every_parameter_learns(case: Case, wiring: str) -> None:
    """Each parameter of each mixer has a gradient, in a program of mixers alone too."""
    for program in ("0 (1-2)*2", "0.a (1-2).a*2"):
        stack = stack_of(case, wiring, program)
        F.cross_entropy(stack(tokens()).logits.flatten(0, 1), tokens(seed=1).flatten()).backward()
        for name, parameter in mixers(stack):
            assert parameter.grad is not None, name
            # keys that all move alike change no softmax
            if not name.endswith("qkv.bias"):
                assert float(parameter.grad.abs().max()) > 1e-10, name


def gradients_are_right(case: Case, wiring: str) -> None:
    """Moving the parameters of a mixer changes the output by as much as their gradients say."""
    stack = stack_of(case, wiring)
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(stack(tokens()).logits.shape, generator=generator, dtype=torch.float64)

    def value() -> torch.Tensor:
        return (stack(tokens()).logits * direction).sum()

    value().backward()
    for name, parameter in mixers(stack)[: len(mixers(stack)) // 3]:
        assert parameter.grad is not None
        step = 1e-6 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        with torch.no_grad():
            parameter += step
            above = float(value())
            parameter -= 2 * step
            below = float(value())
            parameter += step
        expected = float((parameter.grad * step).sum())
        assert abs((above - below) / 2 - expected) < 1e-3 * abs(expected) + 1e-9, name


def costs_are_counted(case: Case, wiring: str) -> None:
    """The FLOPs of its maps and of tokens with tokens are those of one causal pass that computes all pairs."""
    stack = stack_of(case, wiring, "1")
    mixer: Any = stack.layers[0].get_submodule("a.sublayer")
    counted: list[int] = []

    def count(module: nn.Module, inputs: Any) -> None:
        # the one kernel whose products the counter sees
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            type(module).forward(module, *inputs)
        counted.append(counter.get_total_flops())

    mixer.register_forward_pre_hook(count)
    stack(tokens(1, 8))
    pairs = 0 if not mixer.per_key else 8 * 8 * mixer.per_key
    assert counted == [mixer.flops(8) + pairs]
    assert stack_cost(stack, 8).cache_bytes == 8 * 4 * mixer.kept


LAWS: list[Callable[[Case, str], None]] = [
    laws.cached_equals_uncached,
    laws.batches_are_independent,
    laws.no_position_sees_a_later_one,
    laws.saved_equals_loaded,
    laws.recomputed_equals_kept,
    every_parameter_learns,
    gradients_are_right,
    costs_are_counted,
]


def mixers(stack: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in stack.named_parameters() if ".a.sublayer." in name]


def cases() -> Iterator[object]:
    """All laws under Pre-LN, and the first under the other wirings; the slow set has all of them everywhere."""
    for name, case in CASES.items():
        for wiring in WIRINGS:
            for law in LAWS:
                fast = wiring == "pre-ln" or law is laws.cached_equals_uncached
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(law, case, wiring, id=f"{name}-{wiring}-{law.__name__}", marks=marks)


@pytest.mark.parametrize(("law", "case", "wiring"), list(cases()))
def test_law(law: Callable[[Case, str], None], case: Case, wiring: str) -> None:
    law(case, wiring)


def test_every_mixer_and_every_option_has_a_case() -> None:
    given: dict[str, set[str]] = {}
    for fields in MIXERS.values():
        mixer = fields["mixer"]
        table = {"name": mixer} if isinstance(mixer, str) else dict(mixer)
        given.setdefault(table.pop("name"), set()).update(table)
    assert set(given) == {each.name for each in methods("mixer")}
    for name, options in given.items():
        assert set(list(signature(lookup(name).implementation).parameters)[1:]) <= options
