"""Wrong copies of formulas that are easy to get wrong: the laws and the identities catch each of them.

A mutant takes the place of its wiring in the register; the check then has to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen import registry
from deepen.sublayers.contract import Read
from deepen.wiring.attention_residuals import AttentionResiduals, Sources
from deepen.wiring.base import Wiring
from deepen.wiring.branch_gain import multiply_branches
from deepen.wiring.cross_layer_attention import CrossLayerAttention
from deepen.wiring.deep_delta import DeepDelta
from deepen.wiring.deep_delta_matrix import DeepDeltaMatrix
from deepen.wiring.deeploop import DeepLoop
from deepen.wiring.deepnorm import DeepNorm
from deepen.wiring.denseformer import Dense, DenseFormer
from deepen.wiring.depth_scaled_sandwich import DepthScaledSandwich
from deepen.wiring.elc_bert import ELCBert
from deepen.wiring.hyper_connections import HyperConnections
from deepen.wiring.manifold_hyper_connections import ManifoldHyperConnections
from deepen.wiring.orthogonal_hyper_connections import OrthogonalHyperConnections, left, right, unit
from deepen.wiring.pre_ln import PreLN
from deepen.wiring.rezero import ReZero
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import GROUP, LOOPED, PLAIN, Case
from tests.wiring import test_history as history
from tests.wiring import test_norms as norms
from tests.wiring import test_streams as streams


class MixingUnused(HyperConnections):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return state + read.carry[1].unsqueeze(-1) * y.unsqueeze(-2)


class MixingTransposed(HyperConnections):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return read.carry[0] @ state + read.carry[1].unsqueeze(-1) * y.unsqueeze(-2)


class GateAlongTokens(HyperConnections):
    """The weight (B, T, 1) of a gate meets the streams (B, T, n, D) without an axis for them."""

    def combine(self, states: Any, weights: Any) -> Any:
        return Wiring.combine(self, states, weights)


class BoundedMixingTransposed(ManifoldHyperConnections):
    def matrix(self, logits: Any) -> Any:
        return super().matrix(logits).mT


class ColumnsLast(ManifoldHyperConnections):
    def matrix(self, logits: Any) -> Any:
        matrix = torch.exp(logits.unflatten(-1, (self.streams, self.streams)))
        for _ in range(self.iters):
            matrix = matrix / matrix.sum(-1, keepdim=True)
            matrix = matrix / matrix.sum(-2, keepdim=True)
        return matrix


class StaticGates(ManifoldHyperConnections):
    def weights(self, state: Any, index: int) -> Any:
        return super().weights(torch.zeros_like(state) + 1, index)


class NotConjugated(OrthogonalHyperConnections):
    def matrix(self, logits: Any) -> Any:
        q, r = (unit(part + torch.eye(4, dtype=part.dtype)[0]) for part in logits.split(4, -1))
        return left(q) @ right(r)


class StoresAverages(DenseFormer):
    def write(self, state: Dense, site: Any, read: Any, y: Any, norm: Any) -> Dense:
        new = super().write(state, site, read, y, norm)
        if len(new.history.sources) == len(state.history.sources):
            return new
        return Dense(new.x, state.history.push(new.x))


class StaleSources(DenseFormer):
    """The newest output is left out of the average."""

    def write(self, state: Dense, site: Any, read: Any, y: Any, norm: Any) -> Dense:
        visit = self.last.get(site.index)
        new = super().write(state, site, read, y, norm)
        if visit is None:
            return new
        return Dense(new.history.mix(self.weights[str(visit)].roll(-1)), new.history)


class RawWeights(ELCBert):
    def read(self, state: Any, site: Any) -> Read:
        if site.index in self.first and site.visit:
            mixed = state.history.mix(self.weights[site.visit - 1])
            return Read(mixed, carry=mixed)
        return super().read(state, site)


class NormalisedValues(AttentionResiduals):
    """The values are normalised like the keys."""

    def write(self, state: Sources, site: Any, read: Any, y: Any, norm: Any) -> Sources:
        return super().write(state, site, read, y * self._inverse(y).unsqueeze(-1), norm)


class BlockKeepsItsSum(AttentionResiduals):
    def write(self, state: Sources, site: Any, read: Any, y: Any, norm: Any) -> Sources:
        new = super().write(state, site, read, y, norm)
        return new if new.part is not None else new._replace(part=new.history.sources[-1])


class AlphaOnTheBranch(DeepNorm):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return norm(state + self.alpha * y)


class BetaOnQueriesAndKeys(DeepNorm):
    def initialise(self, layers: Any) -> None:
        super().initialise(layers)
        for layer in layers.values():
            layer.get_parameter("a.sublayer.qkv.weight").data[: self.shape.heads * self.shape.head_width] *= self.beta


class BetaEachTurn(DeepLoop):
    def initialise(self, layers: Any) -> None:
        for site in self.shape.sites:
            if site.part == "a":
                multiply_branches([layers[site.key.layer]], self.shape, self.beta)


class LayersNotTurns(DeepLoop):
    def __init__(self, shape: Any, *, p: float = 0.5) -> None:
        super().__init__(shape, p=p)
        self.alpha, self.beta = (2 * shape.layers) ** p, (8 * shape.layers) ** -p


class SquaredDepth(DepthScaledSandwich):
    def initialise(self, layers: Any) -> None:
        super().initialise(layers)
        for layer in layers.values():
            layer.get_parameter("a.after.weight").data *= self.shape.blocks**-0.5


class DirectionOverTokens(DeepDelta):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        k = F.normalize(y, dim=1)
        return state + self.strength(read.u, site) * (2 - (k * state).sum(-1, keepdim=True)) * k


class WriteWithoutStrength(DeepDelta):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        k = F.normalize(y, dim=-1)
        return state + 2 * k - self.strength(read.u, site) * (k * state).sum(-1, keepdim=True) * k


class SeesTheNextToken(DeepDeltaMatrix):
    def _compressed(self, state: Any, index: int) -> Any:
        return super()._compressed(state._replace(x=state.x.roll(-1, dims=1)), index)


class ForgetsEarlierTokens(DeepDeltaMatrix):
    def init(self, x: Any, earlier: Any) -> Any:
        return super().init(x, earlier._replace(held={}))


class SeesPadding(DeepDeltaMatrix):
    def init(self, x: Any, earlier: Any) -> Any:
        return super().init(x, earlier._replace(valid=None))


class GroupsOneLate(CrossLayerAttention):
    """The second visit of each group writes; the first, which reads, has nothing to read."""

    def plan(self, plan: Any) -> Any:
        made = super().plan(plan)
        swapped = tuple(replace(visit, writes=not visit.writes) for visit in made.visits)
        return replace(made, visits=swapped)


class SlotsOfEveryVisit(CrossLayerAttention):
    def plan(self, plan: Any) -> Any:
        return replace(super().plan(plan), slots=plan.slots)


class UnsavedFactor(PreLN):
    """A random number that is no parameter."""

    def reset(self) -> None:
        self.factor = 1 + float(torch.rand(()))

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return self.factor * state + y


class RemembersCalls(PreLN):
    """A second computation of a site is another function."""

    calls = 0

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        self.calls += 1
        return state + y * (1 + self.calls % 13)


class CentresTheBatch(PreLN):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return state + y - y.mean(0)


class NotLearned(ReZero):
    """Only the first factor is used."""

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return state + self.factors[0] * y


class FactorsStepTwice(ReZero):
    """A gradient that is not that of the function."""

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        factor = self.factors[site.visit]
        return state + (2 * factor - factor.detach()) * y


Check = Callable[[], object]
MUTANTS: list[tuple[str, type[Wiring], Check]] = [
    ("hyper-connections", MixingUnused, lambda: laws.every_parameter_learns(Case("hyper-connections"), PLAIN)),
    ("hyper-connections", MixingTransposed, streams.test_a_site_of_hyper_connections_written_out),
    (
        "hyper-connections",
        GateAlongTokens,
        lambda: (
            laws.owned_parameters_begin_neutral(Case("hyper-connections"), "gate")
            or laws.cached_equals_uncached(Case("hyper-connections"), laws.all_features(HyperConnections))
        ),
    ),
    (
        "manifold-hyper-connections",
        BoundedMixingTransposed,
        lambda: streams.test_a_gated_site_written_out("manifold-hyper-connections", 16),
    ),
    (
        "manifold-hyper-connections",
        ColumnsLast,
        lambda: streams.test_a_gated_site_written_out("manifold-hyper-connections", 16),
    ),
    (
        "manifold-hyper-connections",
        StaticGates,
        lambda: streams.test_a_gated_site_written_out("manifold-hyper-connections", 16),
    ),
    (
        "orthogonal-hyper-connections",
        NotConjugated,
        lambda: streams.test_a_gated_site_written_out("orthogonal-hyper-connections", 8),
    ),
    (
        "denseformer",
        StoresAverages,
        lambda: history.test_denseformer_averages_what_visits_left_before_any_averaging({}),
    ),
    ("denseformer", StaleSources, lambda: laws.equals_pre_ln(Case("denseformer"), PLAIN)),
    ("elc-bert", RawWeights, lambda: history.test_elc_bert_written_out("base", False)),
    ("attention-residuals", NormalisedValues, lambda: laws.equals_pre_ln(Case("attention-residuals"), PLAIN)),
    (
        "attention-residuals",
        BlockKeepsItsSum,
        lambda: laws.equals_pre_ln(Case("attention-residuals", {"block": 2}), LOOPED),
    ),
    ("deepnorm", AlphaOnTheBranch, norms.test_deepnorm_is_post_ln_with_branches_divided_by_alpha),
    (
        "deepnorm",
        BetaOnQueriesAndKeys,
        lambda: norms.test_beta_multiplies_values_outputs_and_feed_forwards_once("deepnorm", 48**-0.25),
    ),
    (
        "deeploop",
        BetaEachTurn,
        lambda: norms.test_beta_multiplies_values_outputs_and_feed_forwards_once("deeploop", 48**-0.5),
    ),
    ("deeploop", LayersNotTurns, norms.test_deeploop_counts_every_turn),
    (
        "depth-scaled-sandwich",
        SquaredDepth,
        lambda: norms.test_updates_of_the_depth_scaled_sandwich_have_the_stated_size(8),
    ),
    ("deep-delta", DirectionOverTokens, lambda: laws.no_position_sees_a_later_one(Case("deep-delta"), PLAIN)),
    (
        "deep-delta",
        WriteWithoutStrength,
        lambda: streams.test_a_site_replaces_what_the_stream_holds_along_its_output("constant"),
    ),
    (
        "deep-delta-matrix",
        SeesTheNextToken,
        lambda: laws.no_position_sees_a_later_one(Case("deep-delta-matrix"), PLAIN),
    ),
    ("deep-delta-matrix", ForgetsEarlierTokens, lambda: laws.cached_equals_uncached(Case("deep-delta-matrix"), LOOPED)),
    ("deep-delta-matrix", SeesPadding, lambda: laws.batches_are_independent(Case("deep-delta-matrix"), GROUP)),
    ("cross-layer-attention", SlotsOfEveryVisit, lambda: laws.counts_are_right(Case("cross-layer-attention"), PLAIN)),
    ("pre-ln", UnsavedFactor, lambda: laws.saved_equals_loaded(Case("pre-ln"), PLAIN)),
    ("pre-ln", RemembersCalls, lambda: laws.recomputed_equals_kept(Case("pre-ln"), PLAIN)),
    ("pre-ln", CentresTheBatch, lambda: laws.batches_are_independent(Case("pre-ln"), PLAIN)),
    ("rezero", NotLearned, lambda: laws.every_parameter_learns(Case("rezero"), LOOPED)),
    ("rezero", FactorsStepTwice, lambda: laws.gradients_are_right(Case("rezero"), LOOPED)),
    ("cross-layer-attention", GroupsOneLate, lambda: laws.cached_equals_uncached(Case("cross-layer-attention"), PLAIN)),
]


@contextmanager
def registered(name: str, mutant: type[Wiring], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mutant in the place of its wiring."""
    found = registry.lookup(name)
    with monkeypatch.context() as patch:
        patch.setitem(registry._METHODS, name, replace(found, made=mutant))
        yield


@pytest.mark.parametrize(("name", "mutant", "check"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_copy_is_caught(name: str, mutant: type[Wiring], check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    with registered(name, mutant, monkeypatch), pytest.raises((AssertionError, RuntimeError, KeyError)):
        check()
