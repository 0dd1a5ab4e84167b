"""Wrong copies of the wirings of other publications, as in `test_mutations.py`: each is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepen.wiring import prores
from deepen.wiring.base import Wiring
from deepen.wiring.deep_cross_attention import DeepCrossAttention, Outputs
from deepen.wiring.highway import Highway
from deepen.wiring.identity_hyper_connections import IdentityHyperConnections
from deepen.wiring.layer_drop import LayerDrop
from deepen.wiring.lime import LIMe
from deepen.wiring.moda import MoDA
from deepen.wiring.muddformer import MUDDFormer
from deepen.wiring.prores import ProRes
from deepen.wiring.random_cross_layer_attention import RandomCrossLayerAttention
from deepen.wiring.short_swa import PADDING, ShortSWA
from deepen.wiring.skipinit import SkipInit
from deepen.wiring.stochastic_depth import StochasticDepth
from deepen.wiring.vertical_attention import VerticalAttention
from tests.laws import wiring_laws as laws
from tests.laws.wiring_laws import GROUP, LOOPED, PLAIN, Case
from tests.wiring import test_deep_cross_attention as crossing
from tests.wiring import test_identity_streams as identity
from tests.wiring import test_lime as memory
from tests.wiring import test_moda as depths
from tests.wiring import test_muddformer as multiway
from tests.wiring import test_random_cross_layer_attention as routing
from tests.wiring import test_random_depth as dropping
from tests.wiring import test_schedules as schedules
from tests.wiring import test_short_swa as short
from tests.wiring import test_vertical_attention as vertical
from tests.wiring.test_mutations import registered


class RotatedBeforeTheMix(LIMe):
    """Keys are mixed after a rotation, as from a cache."""

    def on_keys(self, state: Any, site: Any, read: Any) -> Any:
        hook = super().on_keys(state, site, read)

        def turned(q: Any, k: Any, v: Any) -> Any:
            angle = torch.arange(k.shape[1], dtype=k.dtype)[None, :, None, None]
            return hook(q, k * angle.cos() + k.roll(k.shape[-1] // 2, -1) * angle.sin(), v)

        return turned


class KeysAlone(LIMe):
    """Values are not mixed."""

    def on_keys(self, state: Any, site: Any, read: Any) -> Any:
        hook = super().on_keys(state, site, read)
        return lambda q, k, v: (*hook(q, k, v)[:2], v)


class RemembersTheMix(LIMe):
    """Later visits mix what earlier visits have mixed."""

    def on_keys(self, state: Any, site: Any, read: Any) -> Any:
        hook = super().on_keys(state, site, read)

        def kept(q: Any, k: Any, v: Any) -> Any:
            q, k, v = hook(q, k, v)
            again: list[Any] = []
            super(RemembersTheMix, self).on_keys(state, site, read._replace(carry=again))(q, k, v)
            read.carry[:] = again
            return q, k, v

        return kept


class SharesOfSoftmax(MUDDFormer):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        new = super().write(state, site, read, y, norm)
        if site.index not in self.last:
            return new
        fixed = self.mixes[site.visit].get_parameter("fixed").softmax(-1)
        return new._replace(ways=tuple(new.history.mix(each) for each in fixed))


class OneStreamForAll(MUDDFormer):
    """The stream is the mix for queries."""

    def read(self, state: Any, site: Any) -> Any:
        read = super().read(state, site)
        return read._replace(carry=read.u)


class RawNewest(MUDDFormer):
    """The weights are read from the newest output without a norm."""

    def __init__(self, shape: Any, *, ways: Any = 4) -> None:
        super().__init__(shape, ways=ways)
        for mix in self.mixes.children():
            # far above any square of the stream
            mix.eps = 1e6  # pyright: ignore


class DoubleCount(DeepCrossAttention):
    """The read of the queries is part of what a visit leaves."""

    def write(self, state: Outputs, site: Any, read: Any, y: Any, norm: Any) -> Outputs:
        return super().write(state, site, read, y + read.carry if site.part == "a" else y, norm)


class ClosedGates(DeepCrossAttention):
    """The slope of the relu at 0 is 0."""

    def __init__(self, shape: Any, *, keep: int | None = None) -> None:
        super().__init__(shape, keep=keep)
        for each in self.sums.values():
            each.forward = lambda sources, each=each: crossing.summed(each, sources)


class ForgetsTheMiddle(DeepCrossAttention):
    def write(self, state: Outputs, site: Any, read: Any, y: Any, norm: Any) -> Outputs:
        new = super().write(state, site, read, y, norm)
        return new if state.between is None or new.between is state.between else new._replace(between=state.between)


class RawSources(VerticalAttention):
    def _normalised(self, x: Any) -> Any:
        return x


class OneLateSlot(MoDA):
    """The newest slot is not seen."""

    def beside(self, state: Any, site: Any) -> Any:
        found = super().beside(state, site)
        return found if found is None or len(found.keys) < 2 else found._replace(
            keys=found.keys[:-1], values=found.values[:-1]
        )  # fmt: skip


class OtherTokensSlots(MoDA):
    """A token sees the slots of the token after it."""

    def beside(self, state: Any, site: Any) -> Any:
        found = super().beside(state, site)
        return found and found._replace(keys=tuple(key.roll(-1, dims=1) for key in found.keys))


class SlotsOfOutputs(MoDA):
    """Slots of the feed-forward are read from what it gives, not from what it reads."""

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return super().write(state, site, read._replace(u=y), y, norm)


class WindowOneShort(ShortSWA):
    def __init__(self, shape: Any, *, window: int = 128) -> None:
        super().__init__(shape, window=window)
        self.window = max(1, window - 1)


class SeesEarlierPadding(ShortSWA):
    def init(self, x: Any, earlier: Any) -> Any:
        state = super().init(x, earlier)
        if earlier.kept is not None and PADDING in earlier.kept:
            earlier.kept[PADDING] = torch.ones_like(earlier.kept[PADDING])
        return state


class NearestSource(RandomCrossLayerAttention):
    """A visit that crosses always takes the keys of the visit right before it."""

    def init(self, x: Any, earlier: Any) -> Any:
        state = super().init(x, earlier)
        return state if state.draws is None else state._replace(draws=tuple((c, 0.999) for c, _ in state.draws))


class CrossesOutsideOfTraining(RandomCrossLayerAttention):
    def init(self, x: Any, earlier: Any) -> Any:
        return super().init(x, earlier)._replace(draws=((0.0, 0.0),) * len(self.ranks))


class EveryKeptOneLater(RandomCrossLayerAttention):
    def plan(self, plan: Any) -> Any:
        self.keep = self.keep and frozenset({0} | {rank + 1 for rank in self.keep if rank})
        return super().plan(plan)


class BlocksFromTheEnd(ProRes):
    """Late blocks are warmed up first."""

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        last = self.shape.visits - site.visit
        return state + prores.factor(self.schedule, self.step, last, self.shape.visits, self.base) * y


class StepsAreLost(ProRes):
    """The step is no part of what is saved."""

    def __init__(self, shape: Any, *, schedule: Any = "linear", base: int = 1000) -> None:
        super().__init__(shape, schedule=schedule, base=base)
        self.register_buffer("step", torch.zeros((), dtype=torch.long), persistent=False)


class OpenAtFirst(SkipInit):
    def reset(self) -> None:
        torch.nn.init.ones_(self.factors)


class GatesSwapped(Highway):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return torch.lerp(y, state, torch.sigmoid(F.linear(state, self.maps[site.index], self.biases[site.index])))


class NotRescaled(StochasticDepth):
    """The inverted form without its division."""

    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        factor = 1 if state.keeps is None else state.keeps[:, site.index, None, None].to(y.dtype)
        return state._replace(x=state.x + factor * y)


class EarlyVisitsDropped(StochasticDepth):
    def __init__(self, shape: Any, **options: Any) -> None:
        super().__init__(shape, **options)
        self.keep = self.keep[::-1]


class PartsDrawForThemselves(LayerDrop):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        other = site.visit if site.part == "a" else (site.visit + 1) % self.shape.visits
        factor = 1 if state.keeps is None else state.keeps[:, other, None, None].to(y.dtype)
        return state._replace(x=state.x + factor * y)


class StreamsAreMixed(IdentityHyperConnections):
    def write(self, state: Any, site: Any, read: Any, y: Any, norm: Any) -> Any:
        return super().write(state.mean(-2, keepdim=True).expand_as(state), site, read, y, norm)


Check = Callable[[], object]
# The first runs always: one of each kind of state.
MUTANTS: list[tuple[str, type[Wiring], Check]] = [
    ("lime", KeysAlone, memory.test_keys_and_values_written_out),
    ("muddformer", OneStreamForAll, multiway.test_four_ways_written_out),
    ("deep-cross-attention", DoubleCount, lambda: laws.equals_pre_ln(Case("deep-cross-attention"), PLAIN)),
    ("moda", OtherTokensSlots, lambda: laws.no_position_sees_a_later_one(Case("moda"), PLAIN)),
]
SLOW: list[tuple[str, type[Wiring], Check]] = [
    ("lime", RotatedBeforeTheMix, memory.test_keys_and_values_written_out),
    ("lime", RemembersTheMix, memory.test_keys_and_values_written_out),
    ("muddformer", SharesOfSoftmax, lambda: laws.equals_pre_ln(Case("muddformer"), LOOPED)),
    ("muddformer", RawNewest, multiway.test_four_ways_written_out),
    ("deep-cross-attention", ClosedGates, crossing.test_gates_have_a_gradient_at_first),
    ("deep-cross-attention", ForgetsTheMiddle, lambda: crossing.test_written_out(2)),
    ("vertical-attention", RawSources, vertical.test_the_size_of_a_source_does_not_change_what_is_read),
    ("moda", OneLateSlot, lambda: depths.test_written_out(True)),
    ("moda", SlotsOfOutputs, lambda: depths.test_written_out(True)),
    ("short-swa", WindowOneShort, short.test_written_out),
    ("short-swa", SeesEarlierPadding, short.test_a_cache_holds_a_window_less_one_and_remembers_padding),
    (
        "random-cross-layer-attention",
        NearestSource,
        routing.test_the_first_mixer_never_crosses_and_the_others_do_at_the_stated_rate,
    ),
    (
        "random-cross-layer-attention",
        CrossesOutsideOfTraining,
        lambda: laws.equals_pre_ln(Case("random-cross-layer-attention"), GROUP),
    ),
    ("random-cross-layer-attention", EveryKeptOneLater, routing.test_the_last_kept_visit_serves_those_after_it),
    ("prores", BlocksFromTheEnd, schedules.test_prores_warms_early_visits_first),
    ("prores", StepsAreLost, lambda: laws.saved_equals_loaded(Case("prores"), PLAIN)),
    ("skipinit", OpenAtFirst, schedules.test_skipinit_begins_as_the_identity_and_only_its_factors_learn),
    ("highway", GatesSwapped, lambda: schedules.test_a_gate_of_highway_stays_between_the_stream_and_the_output(1e4)),
    (
        "stochastic-depth",
        NotRescaled,
        lambda: dropping.test_the_mean_over_draws_is_the_stream_outside_of_training("inverted"),
    ),
    ("stochastic-depth", EarlyVisitsDropped, dropping.test_stochastic_depth_keeps_late_visits_less_often),
    (
        "layer-drop",
        PartsDrawForThemselves,
        dropping.test_layers_are_dropped_whole_at_the_stated_rate_and_nothing_is_rescaled,
    ),
    (
        "identity-hyper-connections",
        StreamsAreMixed,
        identity.test_two_streams_part_by_the_difference_of_their_write_weights,
    ),
]


@pytest.mark.parametrize(
    ("name", "mutant", "check"),
    [*MUTANTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_copy_is_caught(name: str, mutant: type[Wiring], check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    with registered(name, mutant, monkeypatch), pytest.raises((AssertionError, RuntimeError, KeyError)):
        check()
