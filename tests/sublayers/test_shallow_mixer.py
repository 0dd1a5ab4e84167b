"""The shallow feed-forward in the place of attention, alone and in stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack
from deepen.sublayers.mixer.base import Heads
from deepen.sublayers.mixer.shallow_mixer import ShallowMixer
from tests.laws.ffn_laws import Case, stack_of
from tests.laws.wiring_laws import close, tokens

FIELDS: dict[str, Any] = {"mixer": {"name": "shallow-mixer", "inner": 6}, "window": None, "context": 12}
CASE = Case("swiglu", fields=FIELDS)


@pytest.mark.parametrize(("inner", "parameters"), [(25, 339_275), (50, 659_350)])
def test_parameters_are_those_of_the_paper(inner: int, parameters: int) -> None:
    sizes = Heads(width=128, heads=8, kv_heads=8, head_width=16, causal=False, context=50)
    with torch.device("meta"):
        mixer = ShallowMixer(sizes, inner=inner)
    assert sum(parameter.numel() for parameter in mixer.parameters()) == parameters


@pytest.mark.method("shallow-mixer")
@torch.no_grad()
def test_each_causal_output_is_made_of_the_row_up_to_it() -> None:
    stack = stack_of(CASE, program="0.a")
    mixer: Any = stack.layers[0].get_submodule("a.sublayer")
    seen: list[Any] = []
    mixer.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0].u, out.y)))
    stack(tokens(2, 7))
    ((u, y),) = seen
    for t in range(7):
        row = torch.zeros(2, 12, 16, dtype=torch.float64)
        row[:, : t + 1] = u[:, : t + 1]
        inner = mixer.inner_norm(F.leaky_relu(mixer.up(mixer.norm(row.flatten(1)))))
        close(y[:, t], mixer.out(inner), 1e-12)


@pytest.mark.method("shallow-mixer")
@torch.no_grad()
def test_a_whole_sequence_is_read_at_once_and_padding_gives_zeros() -> None:
    stack = stack_of(Case("swiglu", fields={**FIELDS, "causal": False}), program="0.a")
    mixer: Any = stack.layers[0].get_submodule("a.sublayer")
    seen: list[Any] = []
    mixer.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0].u, out.y)))
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[0, 5:] = False
    valid[1, :2] = False
    stack(tokens(2, 7), valid=valid)
    ((u, y),) = seen
    assert not y[~valid].any()
    for sequence in range(2):
        row = torch.zeros(12, 16, dtype=torch.float64)
        row[:5] = u[sequence, valid[sequence]]
        inner = mixer.inner_norm(F.leaky_relu(mixer.up(mixer.norm(row.flatten()))))
        close(y[sequence, valid[sequence]], mixer.out(inner).view(12, 16)[:5], 1e-12)


class SeesAll(ShallowMixer):
    """A causal mixer that reads the whole row for every token."""

    def forward(self, read: Any, context: Any) -> Any:
        row = F.pad(read.u, (0, 0, 0, self.sizes.context - read.u.shape[1])).flatten(1)
        found = super().forward(read, context)
        return found._replace(y=self._maps(row, context).unsqueeze(1).expand_as(found.y))


@torch.no_grad()
def test_a_look_ahead_is_caught() -> None:
    stack = stack_of(CASE)
    other = tokens(1, 8)
    other[:, 4] += 1
    other[:, 4] %= 29
    for layer in stack.layers:
        layer.get_submodule("a.sublayer").__class__ = SeesAll
    assert float((stack(other).logits - stack(tokens(1, 8)).logits)[:, :4].abs().max()) > 1e-3


def test_costs() -> None:
    stack = stack_of(CASE)
    maps = 12 * 16 * 6 + 6 * 16
    plain = stack_of(Case("swiglu", fields={"window": None, "context": 12}))
    attention = 16 * (4 + 2 * 2) * 4 + 16 * 16
    difference = stack_cost(stack, 0).flops - stack_cost(plain, 0).flops
    assert difference == 5 * 2 * (maps - attention)
    assert stack_cost(stack, 10).cache_bytes == stack_cost(plain, 10).cache_bytes
    assert stack.layers[0].get_submodule("a.sublayer").kept == 16


def test_what_it_cannot_do_is_refused() -> None:
    stack = stack_of(CASE)
    with pytest.raises(UsageError, match="13 tokens, but the mixer has 12 positions"):
        stack(tokens(1, 13))
    with pytest.raises(UsageError, match="mixer: a shallow mixer reads all 12 positions at once; it takes no window"):
        StackConfig.read({"layers": 1, "width": 16, "heads": 2, **FIELDS, "window": 4})
    with pytest.raises(UsageError, match="changes keys and values"):
        stack_of(CASE, "moda", program="0-2")(tokens())


def test_a_wiring_that_scales_branches_takes_it() -> None:
    config = StackConfig.read({"layers": 2, "width": 16, "heads": 2, "wiring": "deepnorm", **FIELDS})
    assert Stack(config)(tokens()).logits.isfinite().all()
