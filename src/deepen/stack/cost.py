"""What a stack costs: the rules of `deepen.program.cost` over its own layers.

FLOPs are those of linear maps, of attention and of the products of a feed-forward; what a wiring computes beside them
is stated by its method, not counted. Its parameters are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepen.program.cost import Cost, Ends, LayerCost, cost
from deepen.stack.config import StackConfig
from deepen.stack.owned import linears
from deepen.stack.stack import Stack

# Bytes of a number in fp32.
BYTES = 4


def stack_cost(
    stack: Stack, context: int, *, counts: Mapping[int, int] | None = None, bytes_per_number: int = BYTES
) -> Cost:
    """The cost of a stack when the last query sees `context` tokens.

    Args:
        stack: the model.
        context: in tokens; for a causal training pass give half the length.
        counts: of run-time loops, by number; the maximum by default.
        bytes_per_number: of keys and values in the cache.

    Raises:
        ProgramError: a count outside the range of its loop.
    """
    layers = [
        layer_cost(stack.config, index, layer, context, bytes_per_number) for index, layer in enumerate(stack.layers)
    ]
    head = 2.0 * stack.head.weight.numel()
    held = (
        stack.embedding,
        stack.grams,
        stack.positions,
        stack.norm,
        stack.wiring,
        None if stack.config.tied else stack.head,
    )
    params = sum(parameter.numel() for module in held if module is not None for parameter in module.parameters())
    ends = Ends(params=params, flops=head, head_flops=head, head_params=stack.head.weight.numel())
    return cost(stack.plan, layers, ends, context, kv_shared_computed=False, counts=counts)


def active_parameters(stack: Stack) -> int:
    """Parameters that act on one token: of experts those that it is sent to, of the others all."""
    feed_forwards: list[Any] = [layer.get_submodule("f.sublayer") for layer in stack.layers]
    idle = sum(sum(p.numel() for p in each.parameters()) - each.active() for each in feed_forwards)
    return sum(parameter.numel() for parameter in stack.parameters()) - idle


def layer_cost(
    config: StackConfig, index: int, layer: nn.Module, context: int, bytes_per_number: int = BYTES
) -> LayerCost:
    """The cost of one layer of a bank, in a pass over `context` tokens."""
    window = config.window_of(index)
    maps = {part: [map_ for _, map_ in linears(layer.get_submodule(part))] for part in "af"}
    feed_forward: Any = layer.get_submodule("f.sublayer")
    mixer: Any = layer.get_submodule("a.sublayer")
    passed = max(1, context)

    def keys(context: int) -> float:
        return context if window is None else min(context, window)

    return LayerCost(
        params={part: sum(each.numel() for each in layer.get_submodule(part).parameters()) for part in "af"},
        flops={
            "a": mixer.flops(passed) / passed,
            "f": feed_forward.flops(passed) / passed,
        },
        flops_per_key=mixer.per_key,
        cache=lambda context: 1.0 * mixer.kept * bytes_per_number * context,
        keys=keys,
        kv_flops=mixer.kept_flops,
        linears={part: [(map_.in_features, map_.out_features) for map_ in maps[part]] for part in "af"},
        width=config.width,
    )
