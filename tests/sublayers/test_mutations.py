"""Wrong copies of formulas that are easy to get wrong: each is caught by a law or an identity.

A mutant's method takes the place of the right one; the check then has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.sublayers.contract import Out
from deepen.sublayers.ffn import moe as moe_file
from deepen.sublayers.ffn.experts import Experts
from deepen.sublayers.ffn.forms import Form
from deepen.sublayers.ffn.hash_layer import HashLayer
from deepen.sublayers.ffn.moe import MoE
from deepen.sublayers.ffn.peer import PEER, Found
from tests.laws import ffn_laws as laws
from tests.sublayers import test_dense as dense
from tests.sublayers import test_experts as experts
from tests.sublayers import test_peer as peer

RIGHT_EXPERTS, RIGHT_MOE, RIGHT_HASH, RIGHT_FIND = Experts.forward, MoE.forward, HashLayer.forward, PEER.find
MIXTURE = laws.Case("moe", {"experts": 4})


def swapped_halves(self: Form, rows: torch.Tensor, gelu: str) -> torch.Tensor:
    value, gate = rows.chunk(2, dim=-1)
    return self.function(gate, gelu) * value


def left_in_order_of_experts(self: Any, x: Any, chosen: Any, weights: Any = None) -> Any:
    """What the experts give is not brought back to the order of the tokens."""
    order = chosen.flatten().argsort(stable=True) // chosen.shape[1]
    y = RIGHT_EXPERTS(self, x, chosen, weights)
    return y[order[:: chosen.shape[1]]]


def gates_not_renormalised(self: Any, read: Any, context: Any) -> Out:
    y, losses, stats = RIGHT_MOE(self, read, context)
    p = (read.u @ self.router.weight.T).softmax(-1).topk(self.top).values
    return Out(y * p.sum(-1, keepdim=True) if self.top > 1 else y / p, losses, stats)


def capacity_over_the_batch(self: Any, x: Any, chosen: Any, weights: Any = None) -> Any:
    """What comes after the third token of an expert is dropped, whoever came before."""
    flat = chosen.flatten()
    rank = (flat[:, None] == flat[None, :]).tril(-1).sum(-1).view_as(chosen)
    kept = (rank < 3).to(x.dtype)
    return RIGHT_EXPERTS(self, x, chosen, kept if weights is None else weights * kept)


def padding_counted(p: torch.Tensor, valid: Any) -> torch.Tensor:
    return p.new_full((len(p), 1), 1 / len(p))


def previous_token(self: Any, read: Any, context: Any) -> Out:
    return RIGHT_HASH(self, read, context._replace(tokens=context.tokens.roll(1, dims=1)))


def one_table(self: Any, read: Any, context: Any) -> Out:
    """All hash functions look into the first table."""
    kept = self.table.clone()
    self.table.copy_(kept[:1].expand_as(kept))
    found = RIGHT_HASH(self, read, context)
    self.table.copy_(kept)
    return found


def keys_in_the_other_order(self: Any, x: Any, context: Any) -> Found:
    scores, found = RIGHT_FIND(self, x, context)
    return Found(scores, found % self.side * self.side + found // self.side)


def half_of_the_candidates(self: Any, x: Any, context: Any) -> Found:
    """The best of one half are met with the best one of the other alone."""
    query = (x @ self.query.weight.T).unflatten(-1, (self.heads, 2, self.key_width))
    products = torch.einsum("nhcd,hcsd->nhcs", F.layer_norm(query, (self.key_width,)), self.keys)
    best, places = products.topk(self.top, dim=-1)
    return Found(best[:, :, 0] + best[:, :, 1, :1], places[:, :, 0] * self.side + places[:, :, 1, :1])


MUTANTS: list[tuple[Any, str, Any, Callable[[], object]]] = [
    (Form, "__call__", swapped_halves, lambda: dense.test_the_equation("swiglu")),
    (Experts, "forward", left_in_order_of_experts, lambda: experts.test_a_mixture_is_each_token_through_its_experts(2)),
    (MoE, "forward", gates_not_renormalised, lambda: experts.test_a_mixture_is_each_token_through_its_experts(1)),
    (MoE, "forward", gates_not_renormalised, lambda: experts.test_a_mixture_is_each_token_through_its_experts(2)),
    (Experts, "forward", capacity_over_the_batch, lambda: laws.batches_are_independent(MIXTURE, "pre-ln")),
    (moe_file, "_shares", padding_counted, experts.test_padding_counts_in_no_statistic),
    (HashLayer, "forward", previous_token, experts.test_an_id_has_the_same_expert_everywhere),
    (HashLayer, "forward", one_table, experts.test_several_hashes_put_a_feed_forward_together_from_blocks),
    (PEER, "find", keys_in_the_other_order, lambda: peer.test_product_keys_find_what_a_search_of_all_finds(400, 5)),
    (PEER, "find", half_of_the_candidates, lambda: peer.test_product_keys_find_what_a_search_of_all_finds(400, 5)),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "check"), MUTANTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_wrong_copy_is_caught(
    owner: Any, name: str, mutant: Any, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, RuntimeError)):
        check()
