"""Softmax attention against its formula, written out head by head and token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepen.stack.masks import PassMasks
from deepen.stack.rotary import Rotary
from deepen.sublayers.contract import Context, Read
from deepen.sublayers.mixer.attention import Attention
from deepen.sublayers.mixer.base import Heads
from tests.laws.wiring_laws import close

HEADS, KV_HEADS, WIDTH, LENGTH, BASE = 4, 2, 6, 7, 100.0


def attention(kind: type[Attention] = Attention, **fields: Any) -> Attention:
    torch.manual_seed(0)
    sizes = Heads(width=20, heads=HEADS, kv_heads=KV_HEADS, head_width=WIDTH, bias=True, out_bias=True, **fields)
    return kind(sizes).double()


def turned(x: torch.Tensor, place: int) -> torch.Tensor:
    """Each pair (i, i + d / 2) of a head x [d] as a complex number, turned by place / base^(2 i / d)."""
    half = WIDTH // 2
    angles = torch.tensor([place / BASE ** (2 * i / WIDTH) for i in range(half)], dtype=torch.float64)
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def written_out(mixer: Attention, u: torch.Tensor, window: int) -> torch.Tensor:
    """The formula for one sequence u [t, D]."""
    projected = u @ mixer.qkv.weight.T + mixer.qkv.bias
    heads = [projected[:, at * WIDTH : (at + 1) * WIDTH] for at in range(HEADS + 2 * KV_HEADS)]
    rows = []
    for t in range(len(u)):
        found = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys, values = heads[HEADS + shared], heads[HEADS + KV_HEADS + shared]
            seen = range(max(0, t - window + 1), t + 1)
            q = turned(heads[head][t], t)
            scores = torch.stack([q @ turned(keys[s], s) / math.sqrt(WIDTH) for s in seen])
            found.append(scores.softmax(0) @ values[list(seen)])
        rows.append(torch.cat(found))
    return torch.stack(rows) @ mixer.out.weight.T + mixer.out.bias


@torch.no_grad()
def as_written(kind: type[Attention], window: int) -> None:
    mixer = attention(kind, window=window)
    u = torch.randn(1, LENGTH, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks = PassMasks(LENGTH, 0, True, None, u.device)
    nowhere: Any = None
    context = Context(nowhere, Rotary(WIDTH, BASE).double()(0, LENGTH, None, u), masks, None, {}, None)
    close(mixer(Read(u), context).y[0], written_out(mixer, u[0], window), 1e-7)


@pytest.mark.method("softmax-attention")
@pytest.mark.parametrize("window", [3, LENGTH])
def test_it_is_its_formula(window: int) -> None:
    as_written(Attention, window)


class Interleaved(Attention):
    """Query head h shares the keys of head h modulo R."""

    def _attended(self, q: Any, *others: Any) -> Any:
        order = [0, 2, 1, 3]
        y = super()._attended(q[:, :, order], *others)
        return y.unflatten(-1, (HEADS, -1))[:, :, order].flatten(2)


class Unscaled(Attention):
    def _attended(self, q: Any, *others: Any) -> Any:
        return super()._attended(q * math.sqrt(WIDTH), *others)


class LookAhead(Attention):
    def _attended(self, q: Any, k: Any, v: Any, mask: Any, causal: Any, straight: Any) -> Any:
        return super()._attended(q, k, v, None, False, straight)


@pytest.mark.parametrize("kind", [Interleaved, Unscaled, LookAhead])
def test_wrong_copies_are_caught(kind: type[Attention]) -> None:
    with pytest.raises(AssertionError):
        as_written(kind, LENGTH)
