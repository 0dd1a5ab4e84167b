"""LIMe: the mix of keys and values of all visits, written out over heads, before rotary positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.sublayers.mixer.attention import rotated
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, Case
from tests.wiring.test_history import sites, tiny

pytestmark = pytest.mark.method("lime")
HEADS, KV_HEADS, HEAD = 4, 2, 4


@torch.no_grad()
def attended(
    stack: Any, layer: int, read: torch.Tensor, memory: list[Any], router: torch.Tensor | None
) -> torch.Tensor:
    """The output of a mixer whose keys and values are mixed head by head; its own are added to the memory."""
    part = stack.layers[layer].a
    q, k, v = part.sublayer.qkv(part.norm(read)).unflatten(-1, (-1, HEAD)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    memory.append((k, v))
    if router is not None:
        mixed = [
            [
                sum(
                    router[r, place * KV_HEADS + h] * tensors[which][:, :, h]
                    for place, tensors in enumerate(memory)
                    for h in range(KV_HEADS)
                )
                for r in range(KV_HEADS)
            ]
            for which in (0, 1)
        ]
        k, v = (torch.stack(heads, dim=2) for heads in mixed)  # pyright: ignore
    cos, sin = stack.rotary(0, read.shape[1], None, read)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return part.sublayer.out(y.transpose(1, 2).flatten(2))


def test_keys_and_values_written_out() -> None:
    stack = laws.changed(Case("lime"), LOOPED, window=None)
    seen, memory, wiring = sites(stack), [], stack.wiring
    mixers = [site for site in wiring.shape.sites if site.part == "a"]
    assert [tuple(each.shape) for each in wiring.routers] == [(2, 4), (2, 6), (2, 8), (2, 10)]  # pyright: ignore
    for rank, site in enumerate(mixers):
        router = wiring.get_parameter(f"routers.{rank - 1}") if rank else None
        y = attended(stack, site.key.layer, seen[site.index, "read"], memory, router)
        torch.testing.assert_close(seen[site.index, "update"], y)
    stream = seen[-1, "stream"] + sum(seen[index, "update"] for index in range(2 * len(mixers)))
    torch.testing.assert_close(seen[-1, "end"], stream)


def test_the_visit_itself_is_whole_at_first_and_older_ones_are_uniform() -> None:
    wiring = tiny("lime", 9)
    last = wiring.routers[-1]
    assert torch.equal(last[:, 8:], torch.eye(1))
    assert 0.5 * (3 / 9) ** 0.5 < float(last[:, :8].detach().abs().max()) <= (3 / 9) ** 0.5
    assert all(not router[:, :-1].any() for router in tiny("lime", 4, past="zero").routers)
    assert sum(parameter.numel() for parameter in wiring.parameters()) == sum(range(2, 10))
