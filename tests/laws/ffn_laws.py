"""The laws of feed-forwards as functions: each takes a case, and fails where a feed-forward breaks the law.

They stand in the tiny double-precision stacks of `wiring_laws`, with random values in every parameter.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepen.registry import lookup
from deepen.stack.config import StackConfig
from deepen.stack.cost import layer_cost, stack_cost
from deepen.stack.init import initialise
from deepen.stack.stack import Stack
from deepen.sublayers.contract import Context, Out, Read
from deepen.sublayers.ffn import grouped, retrieved  # noqa: F401  operations that FORMULAS names
from deepen.sublayers.ffn.base import FeedForward
from tests.laws import wiring_laws
from tests.laws.wiring_laws import VOCABULARY, WIDTH, close, tokens

WIRINGS = ("pre-ln", "hyper-connections", "denseformer")
LOOPED = "0 (1-2)*2"
# FLOPs of the products that torch's counter has no formula of, from the shapes of their arguments.
FORMULAS: dict[Any, Any] = {
    torch.ops.deepen.grouped_linear: lambda x, weight, ends, **_: 2 * x[0] * weight[1] * weight[2],
    torch.ops.deepen.retrieved_products: lambda x, table, places, **_: 2 * math.prod(places) * table[1],
    torch.ops.aten._embedding_bag: lambda table, places, *_, **__: 2 * math.prod(places) * table[1],
    torch.ops.aten._embedding_bag_forward_only: lambda table, places, *_, **__: 2 * math.prod(places) * table[1],
}


@dataclass(frozen=True)
class Case:
    """A feed-forward with options and fields of the configuration."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def kind(self) -> Any:
        return lookup(self.name).implementation

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in {**self.options, **self.fields}.items())])


CASES = (
    Case("bilinear"),
    Case("eugen", {"order": 2, "features": 5, "activation": "gelu", "span": 2.0}, {"bias": True}),
    Case(
        "fast-feed-forward",
        {"depth": 2, "inference": "soft", "hardening": 2.0, "temperature": 0.5, "anneal": 0, "leak": 0.2},
        {"hidden": 3},
    ),
    Case("geglu", fields={"bias": True, "gelu": "none"}),
    Case("gelu", fields={"bias": True}),
    Case("glu"),
    Case("graph-memory", {"key_width": 4, "steps": 10, "upkeep": True}, {"hidden": 6}),
    Case("hash-layer", {"experts": 4, "seed": 3}),
    Case("hash-layer", {"experts": 3, "hashes": 2, "form": "geglu"}, {"bias": True}),
    Case("mask-block", {"ratio": 1.5, "fields": 2, "eps": 1e-3}, {"bias": True}),
    Case(
        "master-leaf",
        {
            "depth": 2,
            "inference": "soft",
            "hardening": 2.0,
            "balance": 0.5,
            "switch": 9,
            "master": 4,
            "temperature": 0.5,
            "anneal": 5,
            "leak": 0.2,
        },
        {"hidden": 3, "bias": True},
    ),
    Case("moe", {"experts": 4}),
    Case("moe", {"experts": 3, "top": 1, "form": "gelu", "balance": 0.1, "z": 0.1}, {"bias": True}),
    Case("moefied", {"experts": 4, "top": 2, "router": "linear", "form": "geglu"}, {"hidden": 16}),
    Case("moefied", {"experts": 3, "router": "mlp", "form": "relu"}, {"hidden": 12, "bias": True}),
    Case("moefied", {"experts": 4, "top": 3, "router": "oracle"}, {"hidden": 12}),
    Case("moefied", {"experts": 2, "top": 2, "router": "similarity", "form": "gelu"}, {"hidden": 8, "bias": True}),
    Case("peer", {"experts": 25, "heads": 2, "top": 4, "key_width": 4}, {"hidden": None}),
    Case("peer", {"experts": 9, "heads": 1, "top": 5, "key_width": 3}, {"hidden": None, "bias": True}),
    Case("projection", {"activation": "gelu"}, {"bias": True}),
    Case("projection", {"activation": "silu", "gated": True, "skip": False}),
    Case("reglu"),
    Case("relu", fields={"bias": True}),
    Case("squared-relu"),
    Case("swiglu"),
    Case("swiglu", fields={"bias": True}),
    Case("ultra-fast-feed-forward", {"depth": 3, "trees": 2}, {"hidden": None, "bias": True}),
    Case("ultra-fast-feed-forward", {"depth": 2, "trees": 4}, {"hidden": None}),
)


def stack_of(case: Case, wiring: str = "pre-ln", program: str | None = LOOPED, **settings: Any) -> Stack:
    """A stack with random values in every parameter."""
    named: dict[str, Any] = {"feed_forward": {"name": case.name, **case.options}, **case.fields}
    return wiring_laws.changed(wiring_laws.Case(wiring), program, **named, **settings)


def feed_forwards(stack: Stack) -> list[FeedForward]:
    found: list[Any] = [layer.get_submodule("f.sublayer") for layer in stack.layers]
    return found


def context(ids: torch.Tensor | None = None, valid: torch.Tensor | None = None) -> Context:
    """Where a feed-forward stands alone."""
    nowhere: Any = None
    return Context(nowhere, None, nowhere, None, {}, ids, valid=valid)


def alone(case: Case) -> tuple[FeedForward, torch.Tensor, torch.Tensor]:
    """A feed-forward with random parameters, an input (2, 7, D) and token ids."""
    ids = tokens()
    u = torch.randn(*ids.shape, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return feed_forwards(stack_of(case))[1], u, ids


def every_parameter_learns(case: Case, wiring: str) -> None:
    """c: each parameter of each feed-forward has a gradient, but for the dead."""
    stack = stack_of(case, wiring)
    ids = tokens(3, 9)
    nn.functional.cross_entropy(stack(ids).logits.flatten(0, 1), ids.roll(-1, dims=1).flatten()).backward()
    for feed_forward in feed_forwards(stack):
        for name, parameter in feed_forward.named_parameters():
            dead = any(fnmatch(name, pattern) for pattern in case.kind.dead)
            assert dead or parameter.grad is not None, f"{name} has no gradient"
            size = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
            if dead:
                assert size < 1e-14, f"{name} is declared dead, but its gradient is {size:.2e}"
            else:
                assert size > 1e-10, f"{name} has no gradient"


def gradients_are_right(case: Case, wiring: str) -> None:
    """d: moving each parameter changes the output, by as much as its gradient says."""
    stack = stack_of(case, wiring)
    ids, generator = tokens(1, 5), torch.Generator().manual_seed(3)
    direction = torch.randn(1, 5, VOCABULARY, generator=generator, dtype=torch.float64)

    def value() -> torch.Tensor:
        return (stack(ids).logits * direction).sum()

    value().backward()
    for name, parameter in feed_forwards(stack)[1].named_parameters():
        dead = any(fnmatch(name, pattern) for pattern in case.kind.dead)
        if dead and parameter.grad is None:
            continue
        assert parameter.grad is not None
        step = 1e-6 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        expected = float((parameter.grad * step).sum())
        with torch.no_grad():
            parameter += step
            above = float(value())
            parameter -= 2 * step
            below = float(value())
            parameter += step
        measured = (above - below) / 2
        assert dead or abs(measured) > 1e-10, f"{name} does not change the output"
        assert abs(measured - expected) < 1e-3 * abs(expected) + 1e-11, f"{name}: {measured} and {expected}"


@torch.no_grad()
def cached_equals_uncached(case: Case, wiring: str) -> None:
    """e: tokens in pieces over a cache give the logits of one pass."""
    stack = stack_of(case, wiring)
    ids = tokens(2, 11)
    whole, cache = stack(ids).logits, stack.new_cache(room=4)
    pieces = [stack(piece, cache=cache).logits for piece in ids.split([3, 1, 2, 1, 4], dim=1)]
    close(torch.cat(pieces, dim=1), whole)


@torch.no_grad()
def saved_equals_loaded(case: Case, wiring: str) -> None:
    """f: configuration and state make the same model again, bit for bit."""
    stack = stack_of(case, wiring)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    loaded = Stack(StackConfig.read(stack.config.model_dump(mode="json")), seed=5).double().eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(tokens()).logits, stack(tokens()).logits)


@torch.no_grad()
def costs_are_right(case: Case) -> None:
    """i: the FLOPs of its products, and its parameters, are those that it counts."""
    feed_forward, u, ids = alone(case)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        feed_forward(Read(u), context(ids))
    assert counter.get_total_flops() == feed_forward.flops(ids.numel())
    stack = stack_of(case)
    parts = layer_cost(stack.config, 1, stack.layers[1], ids.numel())
    assert parts.flops["f"] * ids.numel() == feed_forward.flops(ids.numel())
    assert stack_cost(stack, 9).params == sum(parameter.numel() for parameter in stack.parameters())
    assert 0 < feed_forward.active() <= sum(parameter.numel() for parameter in feed_forward.parameters())


@torch.no_grad()
def batches_are_independent(case: Case, wiring: str) -> None:
    """j: a sequence has the same logits in any company, at any place, and with padding before it."""
    stack = stack_of(case, wiring)
    ids = tokens(3, 8)
    together = stack(ids).logits
    close(stack(ids[[2, 0, 1]]).logits, together[[2, 0, 1]])
    close(stack(ids[1:2]).logits, together[1:2])
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :3] = False
    close(stack(ids, valid=valid).logits[1:2, 3:], stack(ids[1:2, 3:]).logits)


@torch.no_grad()
def no_position_sees_a_later_one(case: Case, wiring: str) -> None:
    """l: changing a token leaves the logits before it as they were; alone, a pointwise one changes that token only."""
    stack = stack_of(case, wiring)
    ids = tokens(1, 8)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    close(stack(other).logits[:, :4], stack(ids).logits[:, :4], 1e-13)
    if case.kind.pointwise:
        feed_forward, u, ids = alone(case)
        moved = u.clone()
        moved[1, 3] += 1
        difference = (feed_forward(Read(moved), context(ids)).y - feed_forward(Read(u), context(ids)).y).abs().amax(-1)
        assert float(difference[1, 3]) > 1e-6
        difference[1, 3] = 0
        assert float(difference.max()) < 1e-13


def recomputed_equals_kept(case: Case, wiring: str) -> None:
    """A visit that is computed again in the backward pass gives the same losses and gradients, in training."""
    wiring_laws.recomputed(stack_of(case, wiring))


def every_value_is_initial(case: Case) -> None:
    """The recipe reaches every parameter and table, the same each time; a silent copy is silent."""
    stack = stack_of(case, program="0-2 2!zero")
    states = []
    for _ in range(2):
        for feed_forward in feed_forwards(stack):
            for tensor in feed_forward.state_dict().values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        initialise(stack, seed=0)
        states.append({name: tensor.clone() for name, tensor in stack.state_dict().items()})
    for name, tensor in states[0].items():
        assert bool((tensor.isfinite() if tensor.is_floating_point() else tensor >= 0).all()), name
        assert torch.equal(tensor, states[1][name]), name
    _, u, ids = alone(case)
    silent = feed_forwards(stack)[3]
    assert not silent(Read(u), context(ids)).y.any()
    assert feed_forwards(stack)[2](Read(u), context(ids)).y.abs().max() > 0


@torch.no_grad()
def neurons_are_independent(case: Case) -> None:
    """Two neurons add what each adds, all of them add everything but biases, and no two share a place."""
    feed_forward, u, ids = alone(case)
    neurons = feed_forward.neurons()
    if not neurons:
        return

    def without(*silent: int) -> torch.Tensor:
        other = copy.deepcopy(feed_forward)
        for index in silent:
            for name, place in neurons[index].writes:
                other.get_parameter(name)[place] = 0
        return other(Read(u), context(ids)).y

    whole = without()
    first, second = 1, len(neurons) // 2
    both = whole - without(first, second)
    close(both, 2 * whole - without(first) - without(second), 1e-9)
    assert float(both.abs().max()) > 1e-6
    if not feed_forward.sizes.bias:
        assert not without(*range(len(neurons))).any()
    seen: dict[str, torch.Tensor] = {name: torch.zeros_like(each) for name, each in feed_forward.named_parameters()}
    for neuron in neurons:
        for name, place in (*neuron.reads, *neuron.writes):
            seen[name][place] += 1
    assert max(float(each.max()) for each in seen.values()) == 1
    fellows = [each for each in neurons if each.group == neurons[0].group]
    swapped = copy.deepcopy(feed_forward)
    places = ((*each.reads, *each.writes) for each in (fellows[0], fellows[-1]))
    for (name, here), (_, there) in zip(*places, strict=True):
        tensor = swapped.get_parameter(name)
        tensor[here], tensor[there] = tensor[there].clone(), tensor[here].clone()
    close(swapped(Read(u), context(ids)).y, whole, 1e-12)


@torch.no_grad()
def adapters_reach_its_maps(case: Case) -> None:
    """A program that gives a visit adapters changes what the feed-forward's linear maps give."""
    stack = stack_of(case, program="0 1[lora=2] 2")
    names = [name for name, _ in stack.owned.named_parameters() if ".f_" in name and name.endswith(".B")]
    assert bool(names) == any(isinstance(each, nn.Linear) for each in feed_forwards(stack)[1].children())
    for name in names:
        before = stack(tokens()).logits
        adapter = stack.owned.get_parameter(name)
        adapter += torch.randn(adapter.shape, generator=torch.Generator().manual_seed(8), dtype=adapter.dtype)
        assert float((stack(tokens()).logits - before).abs().max()) > 1e-8, name


def compiled_equals_eager(case: Case) -> None:
    """k: a compiler's trace of the whole model gives the same logits and gradients."""
    wiring_laws.traced(stack_of(case, program="(0)*2"))


@torch.no_grad()
def half_precision_is_near(case: Case) -> None:
    """k: in bfloat16 the error of a token is in the middle at most four times that of bfloat16 parameters in double.

    In the middle, since a choice that turns on rounding gives single tokens another output.
    """
    stack = stack_of(case)
    ids = tokens(4, 12)
    exact = stack(ids).logits
    stack = stack.to(torch.bfloat16)
    found, of_parameters = stack(ids).logits.double(), stack.double()(ids).logits
    error, allowed = (float((each - exact).square().mean(-1).sqrt().median()) for each in (found, of_parameters))
    assert error < 4 * allowed, f"the error is {error / allowed:.1f} times that of the parameters"


def ran(case: Case, ids: torch.Tensor | None = None) -> Out:
    """What a feed-forward alone gives, in training."""
    feed_forward, u, known = alone(case)
    return feed_forward.train()(Read(u), context(known if ids is None else ids))
