"""All-attention: one softmax over tokens and memories, in stacks whose programs visit attention alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack
from deepen.sublayers.mixer.all_attention import AllAttention
from tests.laws.ffn_laws import Case, stack_of
from tests.laws.wiring_laws import close, tokens

CASE = Case("swiglu", fields={"mixer": {"name": "all-attention", "memories": 5}, "qk_norm": True})


def mixers(stack: Stack) -> list[Any]:
    return [layer.get_submodule("a.sublayer") for layer in stack.layers]


def swapped(stack: Stack, kind: Any) -> Stack:
    """The stack with another class of mixers that hold the same parameters."""
    for mixer in mixers(stack):
        mixer.__class__ = kind
    return stack


@pytest.mark.method("all-attention")
@torch.no_grad()
def test_without_memories_it_is_attention() -> None:
    fields = {"mixer": {"name": "all-attention", "memories": 0}, "qk_norm": True}
    stack = stack_of(Case("swiglu", fields=fields))
    plain = stack_of(Case("swiglu", fields={"qk_norm": True}))
    plain.load_state_dict(stack.state_dict(), strict=False)
    close(stack(tokens()).logits, plain(tokens()).logits, 1e-12)


def alone(memories: int = 5) -> tuple[AllAttention, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A mixer, and queries, keys and values of six tokens."""
    stack = stack_of(Case("swiglu", fields={"mixer": {"name": "all-attention", "memories": memories}}))
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 6, 4, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return mixers(stack)[0], q, k, v


@torch.no_grad()
def without_tokens(kind: Any = AllAttention) -> None:
    """Where no token is seen it is a feed-forward with softmax: softmax(q M_k^T / sqrt(d)) M_v."""
    mixer, q, k, v = alone()
    mixer.__class__ = kind
    nothing = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    found = mixer._attended(q, k, v, nothing, False, q).view(1, 6, 4, 4)
    for head in range(4):
        keys, values = 2 * mixer.memory_keys[head // 2], 5**0.5 * mixer.memory_values[head // 2]
        close(found[0, :, head], torch.softmax(q[0, :, head] @ keys.T / 2, -1) @ values, 1e-12)


@torch.no_grad()
def one_softmax(kind: Any = AllAttention) -> None:
    """Memories that every query wants far more than any token leave nothing to the tokens."""
    mixer, q, k, v = alone()
    mixer.__class__ = kind
    # the queries have a large first value, and so have the keys of the memory
    q = torch.cat([torch.full_like(q[..., :1], 100.0), q[..., 1:]], dim=-1)
    mixer.memory_keys[..., 0] = 10.0
    k[..., 0] = 0
    close(mixer._attended(q, k, v, None, True, q), mixer._attended(q, k, 9 * v, None, True, q), 1e-10)


@torch.no_grad()
def memory_has_no_position(kind: Any = AllAttention) -> None:
    """The memory is met by the query as it was before its rotation."""
    mixer, q, k, v = alone()
    mixer.__class__ = kind
    nothing = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    close(mixer._attended(5 * q, k, v, nothing, False, q), mixer._attended(q, k, v, nothing, False, q), 1e-12)


CHECKS = (without_tokens, one_softmax, memory_has_no_position)


@pytest.mark.method("all-attention")
@pytest.mark.parametrize("check", CHECKS)
def test_identity(check: Any) -> None:
    check()


class TwoSoftmaxes(AllAttention):
    def _attended(self, q: Any, k: Any, v: Any, mask: Any, causal: Any, straight: Any) -> Any:
        nothing = torch.zeros(1, 1, q.shape[1], k.shape[2], dtype=torch.bool)
        of_memory = AllAttention._attended(self, q, k, v, nothing, False, straight)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = q.transpose(1, 2) @ k.mT / 2
        if causal:
            scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        elif mask is not None:
            return of_memory
        return of_memory + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Unscaled(AllAttention):
    def _attended(self, q: Any, k: Any, v: Any, mask: Any, causal: Any, straight: Any) -> Any:
        return super()._attended(q, k, v, mask, causal, straight / 2)


class Rotated(AllAttention):
    def _attended(self, q: Any, k: Any, v: Any, mask: Any, causal: Any, straight: Any) -> Any:
        return super()._attended(q, k, v, mask, causal, q)


@pytest.mark.parametrize("kind", [TwoSoftmaxes, Unscaled, Rotated])
def test_wrong_copies_are_caught(kind: Any) -> None:
    failed = 0
    for check in CHECKS:
        try:
            check(kind)
        except AssertionError:
            failed += 1
    assert failed


@torch.no_grad()
def test_the_order_of_pairs_is_free() -> None:
    stack = stack_of(CASE)
    before = stack(tokens()).logits
    for mixer in mixers(stack):
        for parameter in (mixer.memory_keys, mixer.memory_values):
            parameter.copy_(parameter.flip(1))
    close(stack(tokens()).logits, before, 1e-12)


def test_costs_and_initial_values() -> None:
    fields: dict[str, Any] = {"layers": 1, "width": 64, "heads": 4}
    stack = Stack(StackConfig.read({**fields, "mixer": {"name": "all-attention", "memories": 300}}))
    plain = Stack(StackConfig.read(fields))
    found, without = stack_cost(stack, 8), stack_cost(plain, 8)
    assert found.params - without.params == 2 * 300 * 64
    assert found.flops - without.flops == 4 * 300 * 64
    assert found.cache_bytes == without.cache_bytes
    for values, factor in ((mixers(stack)[0].memory_keys, 16), (mixers(stack)[0].memory_values, 300)):
        assert float(values.detach().std()) * factor**0.5 == pytest.approx(1, abs=0.05)


def test_a_wiring_with_keys_of_its_own_is_refused() -> None:
    stack = stack_of(CASE, "moda", program="0-2")
    with pytest.raises(UsageError, match="all-attention has keys beside those of the sequence already"):
        stack(tokens())


def test_an_unknown_mixer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mixer: no mixer 'all-atention' \(did you mean 'all-attention'\?\)"):
        StackConfig.read({"layers": 1, "width": 8, "heads": 2, "mixer": "all-atention"})
