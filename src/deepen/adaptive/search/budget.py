"""The budget of a search: what a program may cost, as a share of what the whole model costs.

| kind | what is counted |
|---|---|
| `layers` | layers executed for a token; a part counts its share of the parameters of its layer, each turn counts |
| `flops` | FLOPs a token at the context |
| `params` | stored parameters, embeddings and head included |
| `cache` | bytes of the cache at the context |
| `latency` | measured seconds of a pass over one window; differs from run to run, unlike the others |

`0.75` and `75%` mean layers; `flops=0.75` names the kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from deepen.adaptive.search.moves import Bank, Items, text_of
from deepen.errors import UsageError, nearest
from deepen.program import Ends, Index, LayerCost, Loop, Node, Ref, Seq, cost
from deepen.program.tree import children

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

KINDS = ("layers", "flops", "params", "cache", "latency")


@dataclass(frozen=True)
class Budget:
    """What was asked for: a kind of cost, and the share of the model's own."""

    kind: str
    share: Fraction

    def __str__(self) -> str:
        return f"{self.kind}={float(self.share):.6g}"


def parse_budget(text: str) -> Budget:
    """A budget such as `0.75`, `75%`, `3/4` or `flops=0.75`.

    Raises:
        UsageError: an unknown kind, or a share that is not above 0.
    """
    kind, equals, amount = text.rpartition("=")
    kind = kind.strip() if equals else "layers"
    if kind not in KINDS:
        raise UsageError(f"--budget {text}: no budget {kind!r}{nearest(kind, KINDS)}; known are {', '.join(KINDS)}")
    amount = amount.strip()
    try:
        share = Fraction(amount.removesuffix("%")) / (100 if amount.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise UsageError(f"--budget {text}: expected a share of the model's {kind}, such as 0.75 or 75%")
    return Budget(kind, share)


Meter = Callable[[Items], float]


def meter(ck: Checkpoint, kind: str, context: int, seconds: Callable[[str], float]) -> Meter:
    """What measures candidates in this kind; each is measured once.

    Args:
        ck: the checkpoint.
        kind: one of `KINDS`.
        context: tokens of the context, for FLOPs and cache.
        seconds: measures the latency of a program.
    """
    if kind == "layers":
        shares = [_shares(layer.params) for layer in layer_costs(ck)]
        return lambda items: float(executed(Seq(items), shares))
    known: dict[str, float] = {}
    count = seconds if kind == "latency" else _Counter(ck, kind, context)

    def measure(items: Items) -> float:
        text = text_of(items)
        if text not in known:
            known[text] = count(text)
        return known[text]

    return measure


class _Counter:
    """Counts one kind of cost without reading any weight; the layers are examined once."""

    def __init__(self, ck: Checkpoint, kind: str, context: int) -> None:
        self.ck, self.kind, self.context = ck, kind, context
        self.layers = layer_costs(ck)
        whole = ck.cost(context)
        total = {"flops": whole.flops, "params": whole.params, "cache": whole.cache_bytes}[kind]
        self.ends = total - self._own(ck)

    def __call__(self, text: str) -> float:
        return self.ends + self._own(self.ck.apply(text))

    def _own(self, ck: Checkpoint) -> float:
        """What the layers of the tower cost, without embeddings, head and other towers."""
        plan = ck.plan()
        if self.kind == "params":
            # a layer is stored whole as soon as one of its parts is visited
            return float(sum(sum(self.layers[key.layer].params.values()) for key in plan.keys))
        found = cost(plan, self.layers, Ends(params=0, flops=0.0), self.context)
        return found.flops if self.kind == "flops" else found.cache_bytes


def executed(node: Node, shares: Sequence[Mapping[str, Fraction]]) -> Fraction:
    """Layers that a node executes, each visit by the shares of its parts; loops at their maximum."""
    if isinstance(node, Ref):
        own = shares[node.first.value]
        return sum((share for part, share in own.items() if node.parts in (None, part)), Fraction(0))
    turns = node.high if isinstance(node, Loop) else 1
    return turns * sum((executed(child, shares) for child in children(node)), Fraction(0))


def layer_costs(ck: Checkpoint) -> list[LayerCost]:
    """What each layer of the default tower costs."""
    from deepen.checkpoint import layer_cost

    return layer_cost.layer_costs(ck, ck.family.tower(""))


def _shares(params: Mapping[str, int]) -> dict[str, Fraction]:
    """Each part's share of its layer, by parameters; a layer without any counts its parts equally."""
    total = sum(params.values())
    return {part: Fraction(count, total) if total else Fraction(1, len(params)) for part, count in params.items()}


def limit(budget: Budget, measure: Meter, whole: Items, bank: Bank, parts: bool) -> float:
    """The cost that a candidate may have.

    Raises:
        UsageError: no program is that cheap; the nearest share that can be met is named.
    """
    total = measure(whole)
    if total <= 0:
        raise UsageError(f"--budget {budget}: this model has no {budget.kind} to save; choose another kind")
    least = min(measure((one,)) for one in _smallest(bank, parts))
    allowed = total * float(budget.share)
    if least > allowed:
        nearest_share = math.ceil(least / total * 1e4) / 1e4
        raise UsageError(
            f"--budget {budget} cannot be met: the cheapest program costs {least / total:.4f} of the model's "
            f"{budget.kind}; the nearest that can is {budget.kind}={nearest_share:g}"
        )
    return allowed


def _smallest(bank: Bank, parts: bool) -> list[Ref]:
    single = [Ref(Index(layer)) for layer in range(bank.depth)]
    if not parts or len(bank.letters) < 2:
        return single
    return [Ref(ref.first, parts=letter) for ref in single for letter in bank.letters]
