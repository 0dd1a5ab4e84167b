"""MoDA: one softmax over the sequence and the slots of earlier sites, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.sublayers.mixer.attention import rotated
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import LOOPED, Case
from tests.wiring.test_history import sites

pytestmark = pytest.mark.method("moda")
HEADS, KV_HEADS, HEAD = 4, 2, 4


@torch.no_grad()
def attended(stack: Any, part: Any, read: torch.Tensor, slots: list[Any], turn: bool) -> torch.Tensor:
    """The output of a mixer: each token and head asks its sequence and the slots of its own token."""
    inner = part.sublayer
    raw, k, v = inner.qkv(read).unflatten(-1, (-1, HEAD)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    earlier = list(slots)
    slots.append((k, v))
    q, k = inner.q_norm(raw), inner.k_norm(k)
    cos, sin = stack.rotary(0, read.shape[1], None, read)
    straight, q, k = q, rotated(q, cos, sin), rotated(k, cos, sin)
    found = torch.zeros_like(q)
    for batch, token, head in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        group = head // (HEADS // KV_HEADS)
        asks = (q if turn else straight)[batch, token, head]
        logits = [q[batch, token, head] @ k[batch, j, group] for j in range(token + 1)]
        logits += [asks @ inner.k_norm(keys[batch, token, group]) for keys, _ in earlier]
        held = [v[batch, j, group] for j in range(token + 1)] + [values[batch, token, group] for _, values in earlier]
        shares = (torch.stack(logits) / HEAD**0.5).softmax(0)
        found[batch, token, head] = shares @ torch.stack(held)
    return inner.out(found.flatten(2))


@pytest.mark.parametrize("rotated", [True, False])
@torch.no_grad()
def test_written_out(rotated: bool) -> None:
    stack: Any = laws.changed(Case("moda", {"rotated": rotated}), "0 (1)*2", window=None, qk_norm=True)
    seen, slots = sites(stack), []
    x = seen[-1, "stream"]
    assert list(stack.wiring.maps) == ["1", "3"]
    for site in stack.wiring.shape.sites:
        part = stack.layers[site.key.layer].get_submodule(site.part)
        torch.testing.assert_close(seen[site.index, "read"], x)
        if site.part == "a":
            torch.testing.assert_close(seen[site.index, "update"], attended(stack, part, x, slots, rotated))
        elif site.index < 5:
            heads = F.linear(x, stack.wiring.maps[str(site.index)]).unflatten(-1, (2, KV_HEADS, HEAD))
            slots.append((heads[:, :, 0], heads[:, :, 1]))
        x = part.after(x + seen[site.index, "update"])
    assert len(slots) == 5
    torch.testing.assert_close(seen[-1, "end"], x)


@torch.no_grad()
def test_without_slots_it_is_post_ln() -> None:
    one, plain = laws.changed(Case("moda"), "0 1.f"), laws.changed(Case("post-ln"), "0 1.f")
    laws.close(one(laws.tokens()).logits, plain(laws.tokens()).logits)


@torch.no_grad()
def test_slots_that_nobody_asks_for_leave_plain_attention() -> None:
    """Keys far away from every query, as a mask over the slots."""
    stack: Any = laws.changed(Case("moda", {"rotated": False}), LOOPED)
    plain: Any = laws.changed(Case("post-ln"), LOOPED)
    hide = stack.wiring.beside

    def hidden(state: Any, site: Any) -> Any:
        found = hide(state, site)
        return None if found is None else found._replace(keys=tuple(torch.full_like(k, -1e9) for k in found.keys))

    for layer in (*stack.layers, *plain.layers):
        # queries of positive sums, so that such keys have logits far below the others
        layer.a.sublayer.qkv.weight[:16] = 0
    stack.wiring.beside = hidden
    expected = plain(laws.tokens()).logits
    assert float((stack(laws.tokens()).logits - expected).abs().max()) > 1e-6
    for model in (stack, plain):
        for layer in model.layers:
            layer.a.sublayer.qkv = with_queries(layer.a.sublayer.qkv)
    laws.close(stack(laws.tokens()).logits, plain(laws.tokens()).logits)


def with_queries(map_: torch.nn.Linear) -> torch.nn.Linear:
    """The map with a bias of 1 on the queries."""
    made = torch.nn.Linear(map_.in_features, map_.out_features).double()
    made.weight.copy_(map_.weight)
    made.bias.zero_()
    made.bias[:16] = 1
    return made
