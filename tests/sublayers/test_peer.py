"""PEER: the search by product keys against a search of all experts, and its output written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.sublayers.contract import Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.peer import PEER
from deepen.sublayers.ffn.retrieved import retrieved_products
from tests.laws.ffn_laws import context
from tests.sublayers.test_experts import D, drawn, inputs


def made(experts: int, heads: int, top: int, key_width: int = 4) -> Any:
    sizes = Sizes(width=D, hidden=heads * top, gelu="none")
    return drawn(PEER(sizes, experts=experts, heads=heads, top=top, key_width=key_width))


def all_scores(peer: PEER, x: torch.Tensor) -> torch.Tensor:
    """(n, heads, N), the score of every expert."""
    query = (x @ peer.query.weight.T).view(len(x), peer.heads, 2, peer.key_width)
    query = (query - query.mean(-1, keepdim=True)) / (query.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    first, second = (torch.einsum("nhd,hsd->nhs", query[:, :, half], peer.keys[:, half]) for half in (0, 1))
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)


def test_products_with_rows_of_a_table() -> None:
    generator = torch.Generator().manual_seed(3)
    x, table = (torch.randn(size, 4, generator=generator, dtype=torch.float64, requires_grad=True) for size in (3, 6))
    places = torch.tensor([[5, 0, 5], [1, 1, 1], [0, 3, 5]])
    found = retrieved_products(x, table, places)
    assert torch.allclose(found, torch.einsum("nd,nkd->nk", x, table[places]))
    assert torch.autograd.gradcheck(lambda a, b: retrieved_products(a, b, places), (x, table))


@pytest.mark.method("peer")
@pytest.mark.parametrize(("experts", "top"), [(400, 5), (400, 16), (9, 7), (16, 16)])
def test_product_keys_find_what_a_search_of_all_finds(experts: int, top: int) -> None:
    peer, x = made(experts, 3, top), inputs(50)
    with torch.no_grad():
        found = peer.find(x, context())
        expected = all_scores(peer, x).topk(top, dim=-1)
    assert torch.allclose(found.scores, expected.values)
    assert torch.equal(found.experts, expected.indices)


def test_the_output_written_out() -> None:
    peer, u = made(25, 2, 4), inputs(2, 5)
    with torch.no_grad():
        found = peer(Read(u), context())
        x = u.flatten(0, 1)
        best = all_scores(peer, x).topk(4, dim=-1)
        hidden = F.gelu(torch.einsum("nd,nhkd->nhk", x, peer.up[best.indices])) * best.values.softmax(-1)
        expected = torch.einsum("nhk,nhkd->nd", hidden, peer.down[best.indices])
    assert torch.allclose(found.y, expected.view_as(u))
    assert torch.equal(found.stats["chosen"], best.indices)


def test_all_experts_of_one_head_are_a_weighed_dense_feed_forward() -> None:
    peer, u = made(16, 1, 16), inputs(3)
    with torch.no_grad():
        weights = all_scores(peer, u)[:, 0].softmax(-1)
        expected = (F.gelu(u @ peer.up.T) * weights) @ peer.down
        assert torch.allclose(peer(Read(u), context()).y, expected)


def test_experts_that_no_head_finds_get_no_gradient() -> None:
    peer, u = made(100, 2, 3), inputs(4)
    found = peer(Read(u), context())
    found.y.sum().backward()
    chosen = set(found.stats["chosen"].flatten().tolist())
    for name in ("up", "down"):
        moved = peer.get_parameter(name).grad.abs().amax(-1) > 0
        assert set(moved.nonzero().flatten().tolist()) == chosen
