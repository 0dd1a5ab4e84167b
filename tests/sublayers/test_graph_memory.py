"""The graph memory cell: sources, targets, the schedule, the losses and the upkeep between steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Read
from deepen.sublayers.ffn.base import Sizes
from deepen.sublayers.ffn.graph_memory import GraphMemory
from deepen.train.depth import Depth
from deepen.train.learner import Learner
from tests.laws.ffn_laws import context
from tests.laws.wiring_laws import close


def made(kind: type[GraphMemory] = GraphMemory, **options: Any) -> GraphMemory:
    torch.manual_seed(0)
    module = kind(Sizes(width=6, hidden=5), key_width=3, **options)
    module.reset()
    return module.double().eval()


def u(tokens: int = 8) -> torch.Tensor:
    return torch.randn(2, tokens, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_parameters_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        module = GraphMemory(Sizes(width=768, hidden=128))
    assert sum(parameter.numel() for parameter in module.parameters()) == 314_370


@torch.no_grad()
def written_out(kind: type[GraphMemory] = GraphMemory) -> None:
    """Each token by a plain loop over the formulas."""
    module = made(kind)
    c = F.layer_norm(module.centroids, (6,))
    edges = [[module.edges[i, j].exp() if i != j else module.edges.new_zeros(()) for j in range(5)] for i in range(5)]
    p = torch.stack([torch.stack(row) / sum(row) for row in edges])
    rows = []
    for x in u().flatten(0, 1):
        cosines = [F.cosine_similarity(x, each, dim=0) for each in c]
        source = torch.softmax(torch.stack([1 / max(1 - float(cos), 0.01) / x.new_tensor(0.1) for cos in cosines]), 0)
        scores = (module.query.weight @ x) @ (module.key.weight @ c.T) / math.sqrt(3)
        target = torch.softmax(source @ p + scores, 0)
        close(source.sum() + target.sum(), torch.tensor(2.0, dtype=torch.float64), 1e-12)
        rows.append(torch.sigmoid(module.gate) * F.layer_norm((target - source) @ c, (6,)))
    close(module(Read(u()), context()).y.flatten(0, 1), torch.stack(rows), 1e-10)


@pytest.mark.method("graph-memory")
def test_the_equations_written_out() -> None:
    written_out()


class EdgesAsLogits(GraphMemory):
    def transitions(self) -> torch.Tensor:
        return self.edges


class ToItself(GraphMemory):
    def transitions(self) -> torch.Tensor:
        return self.edges.softmax(-1)


class ByColumns(GraphMemory):
    def transitions(self) -> torch.Tensor:
        return super().transitions().T


class Similar(GraphMemory):
    """Near by similarity, not by the inverse of a distance."""

    def source(self, u: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.normalize(u, dim=-1) @ F.normalize(centroids, dim=-1).T / 0.1, dim=-1)


@pytest.mark.parametrize("kind", [EdgesAsLogits, ToItself, ByColumns, Similar])
def test_wrong_cells_are_caught(kind: type[GraphMemory]) -> None:
    with pytest.raises(AssertionError):
        written_out(kind)


@pytest.mark.method("graph-memory")
@torch.no_grad()
def test_the_output_has_the_size_of_its_gate_whatever_that_of_the_input() -> None:
    module = made()
    for scale in (0.1, 1.0, 100.0):
        y = module(Read(scale * u()), context()).y
        sizes = y.square().mean(-1).sqrt()
        torch.testing.assert_close(sizes, torch.full_like(sizes, 0.7311), atol=1e-2, rtol=0)
    centroids = module.centroid_norm(module.centroids)
    close(module.source(100 * u(), centroids), module.source(u(), centroids), 1e-10)
    assert not module.transitions().diagonal().any()


def test_the_temperature_falls_over_the_steps_and_is_low_in_evaluation() -> None:
    module = made(steps=100)
    assert module.temperature() == 0.1
    module.train()
    for step, expected in ((0, 1.0), (50, 0.1 ** math.log(1 + 0.5 * (math.e - 1))), (100, 0.1), (900, 0.1)):
        module.set_step(step)
        assert float(module.temperature()) == pytest.approx(expected)


@pytest.mark.method("graph-memory")
def test_losses_without_padding() -> None:
    module = made().train()
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, 3:] = False
    moved = u()
    moved[0, 3:] += 5
    found, other = (module(Read(each), context(valid=valid)).losses for each in (u(), moved))
    for name, loss in found.items():
        torch.testing.assert_close(other[name], loss)
    c = F.normalize(module.centroids, dim=-1)
    pairs = [(c[i] @ c[j]) ** 2 for i in range(5) for j in range(5) if i != j]
    torch.testing.assert_close(found["ortho"], 0.05 * torch.stack(pairs).mean())
    entropies = torch.special.entr(module.transitions()).sum(-1)
    torch.testing.assert_close(found["edge_entropy"], 0.1 * (4 - entropies).clamp(min=0).mean())
    found["track"].backward()
    assert module.momentum.grad is not None
    assert module.edges.grad is None, "the output that is followed is no target of gradients"


@pytest.mark.method("graph-memory")
def test_centroids_follow_the_mean_of_their_tokens_at_the_next_step() -> None:
    module = made().train()
    before = module.centroids.detach().clone()
    with torch.no_grad():
        output = (u() + module(Read(u()), context()).y).flatten(0, 1)
        nearest = module.source(u(), module.centroid_norm(module.centroids)).argmax(-1).flatten()
    assert torch.equal(module.centroids, before), "a pass moves nothing"
    module.set_step(1)
    m = torch.sigmoid(module.momentum.detach())
    for index in range(5):
        own = output[nearest == index]
        moved = m * before[index] + (1 - m) * own.mean(0) if len(own) else before[index]
        torch.testing.assert_close(module.centroids[index], F.normalize(moved, dim=0), check_dtype=False)
    after = module.centroids.detach().clone()
    module.set_step(2)
    assert torch.equal(module.centroids, after), "what was collected is used once"
    module.eval()
    module(Read(u()), context())
    module.set_step(3)
    assert torch.equal(module.centroids, after), "evaluation collects nothing"


@torch.no_grad()
def test_equal_and_unused_centroids_begin_anew() -> None:
    module = made().train()
    module.centroids[3] = module.centroids[1]
    module.age.fill_(200)
    module.usage.copy_(torch.tensor([0.3, 0.3, 1e-5, 0.1, 0.3]))
    module(Read(u()), context())
    # no token moves a centroid
    module.counts.zero_()
    module.used.zero_()
    kept = F.normalize(module.centroids, dim=-1)
    module.set_step(1)
    same = (module.centroids * kept).sum(-1) > 1 - 1e-6
    assert same.tolist() == [True, True, False, False, True]
    assert module.age.tolist() == [201, 201, 0, 0, 201]
    torch.testing.assert_close(module.centroids.norm(dim=-1), torch.ones(5), check_dtype=False)


def test_upkeep_runs_in_a_stack_between_steps_the_same_after_a_load() -> None:
    config = StackConfig(
        layers=2, width=8, heads=2, vocabulary=7, hidden=4, feed_forward={"name": "graph-memory", "key_width": 3}
    )
    stack = Stack(config).train()
    module: Any = stack.layers[0].get_submodule("f.sublayer")
    before = module.centroids.detach().clone()
    result = stack(torch.randint(0, 7, (2, 9), generator=torch.Generator().manual_seed(0)))
    (result.logits.square().mean() + sum(result.losses.values())).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())
    # one that begins anew, at a token that is drawn
    module.usage[2] = module.used[2] = 0
    other = Stack(config)
    other.load_state_dict(stack.state_dict())
    for each in (stack, other):
        Depth(Learner(each), steps=9, seed=0).before(1)
    assert not torch.equal(module.centroids, before)
    assert all(torch.equal(one, two) for one, two in zip(stack.parameters(), other.parameters(), strict=True))
    assert int(module.seen) == 0


def test_a_graph_of_one_centroid_is_refused() -> None:
    with pytest.raises(UsageError, match="2 centroids or more for an edge, got hidden: 1"):
        StackConfig.read({"layers": 1, "width": 8, "heads": 2, "hidden": 1, "feed_forward": "graph-memory"})
