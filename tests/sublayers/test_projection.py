"""Projection heads: folding, the gate, unit length and late interaction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.sublayers.contract import Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.projection import Projection, ProjectionHead, late_interaction
from tests.laws.ffn_laws import context
from tests.laws.wiring_laws import close


def u() -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.method("projection")
@pytest.mark.parametrize("hidden", [5, 6])
@pytest.mark.parametrize("skip", [False, True])
@torch.no_grad()
def test_without_activation_it_folds_into_one_map(skip: bool, hidden: int) -> None:
    module = Projection(Sizes(width=6, hidden=hidden, bias=True), skip=skip).double()
    close(module.fold()(u()), module(Read(u()), context()).y, 1e-12)
    if skip:
        # (W_2 + S_2) (W_1 + S_1), and not the products of maps and skips alone
        assert float((module.fold().weight - module.down.weight @ module.up.weight).abs().max()) > 0.01


@pytest.mark.method("projection")
@torch.no_grad()
def test_skips_stand_beside_the_activation() -> None:
    module = Projection(Sizes(width=6, hidden=5), activation="relu").double()
    skip_up: Any = module.skip_up
    hidden = F.relu(module.up(u())) + skip_up(u())
    close(module(Read(u()), context()).y, module.down(hidden) + module.skip_down(hidden), 1e-12)
    with pytest.raises(UsageError, match="the activation relu is no linear map"):
        module.fold()


@pytest.mark.method("projection")
@torch.no_grad()
def test_the_first_half_of_the_rows_is_the_gate() -> None:
    module = Projection(Sizes(width=6, hidden=5), activation="silu", gated=True).double()
    gate, value = F.linear(u(), module.up.weight[:5]), F.linear(u(), module.up.weight[5:])
    close(module(Read(u()), context()).y, F.linear(F.silu(gate) * value, module.down.weight), 1e-12)
    with pytest.raises(UsageError, match="a gate is no linear map"):
        module.fold()


@pytest.mark.method("projection")
@torch.no_grad()
def test_a_head_gives_vectors_of_unit_length() -> None:
    head = ProjectionHead(6, 3).double()
    vectors = head(u())
    assert vectors.shape == (2, 4, 3)
    close(vectors.norm(dim=-1), torch.ones(2, 4, dtype=torch.float64), 1e-12)
    close(vectors, F.normalize(head.fold()(u()), dim=-1), 1e-12)
    with pytest.raises(UsageError, match="got 6 to 0"):
        ProjectionHead(6, 0)


def test_late_interaction_sums_the_largest_product_of_each_token_of_the_query() -> None:
    generator = torch.Generator().manual_seed(3)
    queries, documents = (torch.randn(count, 3, 4, generator=generator) for count in (2, 5))
    valid = torch.ones(5, 3, dtype=torch.bool)
    valid[1, 2] = False
    expected = [
        [
            sum(max(float(s @ t) for t, ok in zip(document, kept, strict=True) if ok) for s in query)
            for document, kept in zip(documents, valid, strict=True)
        ]
        for query in queries
    ]
    torch.testing.assert_close(late_interaction(queries, documents, valid), torch.tensor(expected))
