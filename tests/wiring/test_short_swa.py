"""ShortSWA: a window over tokens, and the statement that a read along depth is a window over layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.wiring.short_swa import windowed
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, PLAIN, Case
from tests.wiring.test_history import sites

pytestmark = pytest.mark.method("short-swa")


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_read_along_depth_is_a_window_along_the_axis_of_layers(window: int) -> None:
    """h^(l) of one token, l = 0 .. 6, against a read of the last `window` of them, written out."""
    generator = torch.Generator().manual_seed(0)
    states, *maps = (torch.randn(size, generator=generator, dtype=torch.float64) for size in [(7, 8)] + 3 * [(8, 8)])
    q, k, v = (states @ map_ for map_ in maps)
    heads = [x.view(1, 7, 2, 4) for x in (q, k, v)]
    found = windowed(heads[0], heads[1], heads[2], window)[0]
    for layer in range(7):
        before = slice(max(0, layer - window + 1), layer + 1)
        for head in (slice(0, 4), slice(4, 8)):
            shares = (k[before, head] @ q[layer, head] / 2).softmax(0)
            torch.testing.assert_close(found[layer, head.start // 4], shares @ v[before, head])
    if window == 1:
        torch.testing.assert_close(found.flatten(1), v)


@torch.no_grad()
def test_written_out() -> None:
    stack: Any = laws.changed(Case("short-swa", {"window": 3}), LOOPED)
    seen, wiring = sites(stack), stack.wiring
    x = seen[-1, "stream"]
    for site in wiring.shape.sites:
        if site.part == "a":
            rank = site.index // 2
            normed = x / x.square().mean(-1, keepdim=True).sqrt() * wiring.gains[rank]
            q, k, v = (normed @ map_.T for map_ in wiring.reads[rank].chunk(3))
            y = torch.zeros_like(q)
            for token in range(x.shape[1]):
                near = slice(max(0, token - 2), token + 1)
                for head in range(4):
                    own = slice(4 * head, 4 * head + 4)
                    shares = torch.einsum("bd,bsd->bs", q[:, token, own], k[:, near, own] / 2).softmax(-1)
                    y[:, token, own] = torch.einsum("bs,bsd->bd", shares, v[:, near, own])
            x = x + F.linear(y, wiring.gives[rank])
        torch.testing.assert_close(seen[site.index, "read"], x)
        x = x + seen[site.index, "update"]
    torch.testing.assert_close(seen[-1, "end"], x)


@torch.no_grad()
def test_a_cache_holds_a_window_less_one_and_remembers_padding() -> None:
    stack = laws.changed(Case("short-swa", {"window": 3}), PLAIN)
    ids, valid = laws.tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    cache = stack.new_cache()
    pieces = [stack(ids[:, :5], cache=cache, valid=valid[:, :5]).logits]
    assert [held.shape[1] for held in cache.memory.values()] == [2, 2, 2, 2]
    pieces += [stack(ids[:, [place]], cache=cache).logits for place in range(5, 9)]
    laws.close(torch.cat(pieces, dim=1)[1:, 4:], stack(ids[1:, 4:]).logits)
    # padding that only a later pass has
    cache = stack.new_cache()
    stack(ids[:, :3], cache=cache)
    later = stack(ids[:, 3:5], cache=cache, valid=torch.tensor([[True, True], [True, False]])).logits
    laws.close(later[:1], stack(ids[:1, :5]).logits[:, 3:])
