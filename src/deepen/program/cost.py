"""What a plan costs: parameters, layers, critical path, FLOPs per token, cache slots and bytes.

The family of the model gives the cost of a layer part by part; everything else follows from the plan. A visit inside
`res=r` and `cap=c` counts r c, and its queries see that share of the keys; a group is as deep as its deepest branch;
`solve` runs its members K times in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

from deepen.errors import ProgramError
from deepen.program.plan import Plan, Visit
from deepen.program.tape import per_turn
from deepen.program.tree import Attr, Group, Key, Loop, Mark, Node, Ref, Scope, Seq, value_of


def all_keys(context: int) -> float:
    """Full attention: a query at the end of the context sees every key."""
    return context


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs.

    Attributes:
        params: parameters of each part.
        flops: forward FLOPs per token of the linears of each part.
        flops_per_key: FLOPs per token for each key that the mixer sees (4 x heads x head size for attention).
        cache: context -> bytes that one slot of this layer holds at that context, all tokens together.
        keys: context -> keys that a query sees; a window caps it.
        kv_flops: FLOPs per token of the key and value projections, saved where a visit reads another's slot.
        linears: shapes (in, out) of the linears of each part, for the size of adapters.
        width: width of the stream, for the size of embeddings, gates and routers.

    """

    params: Mapping[str, int]
    flops: Mapping[str, float]
    flops_per_key: float
    cache: Callable[[int], float]
    keys: Callable[[int], float] = all_keys
    kv_flops: float = 0.0
    linears: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    width: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """What does not depend on the program: embedding, final norm, head.

    Attributes:
        params: parameters of all of them.
        flops: forward FLOPs per token of all of them.
        head_flops: FLOPs of the head alone, once more for each exit with `conf`.
        head_params: parameters of the head alone, once more for each exit with `head=own`.

    """

    params: int
    flops: float
    head_flops: float = 0.0
    head_params: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plan costs.

    Attributes:
        params: stored parameters, adapters and ends included.
        layers: stored layers; a part counts its share of the parameters of its layer.
        path: critical path in layers; a part counts one over the number of parts of its layer.
        flops: forward FLOPs per token.
        slots: cache slots.
        cache_bytes: bytes of the cache at the context.
        context: the context, in tokens.
        visits: executions of layers.

    """

    params: int
    layers: Fraction
    path: Fraction
    flops: float
    slots: int
    cache_bytes: float
    context: int
    visits: int


def cost(
    plan: Plan,
    layers: Sequence[LayerCost],
    ends: Ends,
    context: int,
    kv_shared_computed: bool = True,
    counts: Mapping[int, int] | None = None,
) -> Cost:
    """The cost of a plan at a context.

    Args:
        plan: the plan.
        layers: the cost of each layer of the bank.
        ends: embedding, final norm and head.
        context: tokens that the last query may see; for a causal training pass give half the length.
        kv_shared_computed: whether visits that only read a slot (`kv=first`) still compute their keys and values,
            as an unchanged layer of a checkpoint does.
        counts: loop counts for visits, path and FLOPs, by loop number; memory is always that of the maximum.

    Raises:
        ProgramError: `counts` outside the loops' ranges, or `lora` on a layer whose linears are not given.

    """
    if len(layers) != plan.depth:
        raise ValueError(f"{len(layers)} layer costs for {plan.depth} layers")
    plan.tape(counts)
    meter = full = _Meter(plan, layers, ends, context, kv_shared_computed, counts or {})
    path = meter.pass_over(plan.root, (), Fraction(1))
    if counts:
        full = _Meter(plan, layers, ends, context, kv_shared_computed, {})
        full.pass_over(plan.root, (), Fraction(1))
    stored = {(key, part): layers[key.layer].params[part] for key, part in full.stored}
    return Cost(
        params=sum(stored.values()) + sum(full.owned.values()) + ends.params,
        layers=sum((_share(layers[key.layer], part) for key, part in stored), Fraction(0)),
        path=path,
        flops=meter.flops + ends.flops + meter.exits * ends.head_flops,
        slots=plan.slots,
        cache_bytes=sum(full.cached.values()),
        context=context,
        visits=meter.visits,
    )


def _share(layer: LayerCost, part: str) -> Fraction:
    total = sum(layer.params.values())
    return Fraction(layer.params[part], total) if total else Fraction(1, len(layer.params))


@dataclass(slots=True)
class _Meter:
    """Sums up while the plan is walked at given loop counts."""

    plan: Plan
    layers: Sequence[LayerCost]
    ends: Ends
    context: int
    kv_shared_computed: bool
    counts: Mapping[int, int]
    flops: float = 0.0
    visits: int = 0
    exits: int = 0
    stored: set[tuple[Key, str]] = field(default_factory=set)
    # parameters that belong to an attribute, by what they are keyed on
    owned: dict[tuple[object, ...], int] = field(default_factory=dict)
    cached: dict[int, float] = field(default_factory=dict)
    places: dict[tuple[int, tuple[int, ...]], Visit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {(visit.leaf, visit.turn): visit for visit in self.plan.visits}

    @property
    def width(self) -> int:
        return max(layer.width for layer in self.layers)

    def pass_over(self, node: Node, turn: tuple[int, ...], weight: Fraction) -> Fraction:
        """Count the node, which `weight` of the tokens reach; returns its critical path in layers."""
        match node:
            case Ref():
                return self.visit(self.places[node.leaf, turn], weight)
            case Mark():
                self.exits += value_of(node.attrs, "conf") not in (None, inf)
                for name, params in (("head", self.ends.head_params), ("norm", self.width)):
                    if value_of(node.attrs, name) == "own":
                        self.owned[name, node.name] = params
                return Fraction(0)
            case Seq(items=items):
                return sum((self.pass_over(item, turn, weight) for item in items), Fraction(0))
            case Group(branches=branches):
                if value_of(node.attrs, "comb") == "gate":
                    self.owned["comb", node.column] = len(branches)
                return max((self.pass_over(branch, turn, weight) for branch in branches), default=Fraction(0))
            case Scope(body=body):
                inner = self.enter(node.attrs, ("scope", node.number), turn, 0, weight)
                solve = value_of(node.attrs, "solve")
                if isinstance(solve, tuple) and solve != ("gs",):
                    return self.solved(body, turn, inner, int(solve[1]))
                return self.pass_over(body, turn, inner)
            case Loop(body=body):
                path = Fraction(0)
                for passed in range(self.counts.get(node.number, node.high)):
                    inner = self.enter(node.attrs, ("loop", node.number), (*turn, passed), passed, weight)
                    path += self.pass_over(body, (*turn, passed), inner)
                return path

    def solved(self, body: Node, turn: tuple[int, ...], weight: Fraction, times: int) -> Fraction:
        """A fixed-point iteration: all members at once, `times` over."""
        members = body.items if isinstance(body, Seq) else (body,)
        before = self.flops
        longest = max((self.pass_over(member, turn, weight) for member in members), default=Fraction(0))
        self.flops = before + times * (self.flops - before)
        return times * longest

    def enter(
        self, attrs: tuple[Attr, ...], node: tuple[str, int], turn: tuple[int, ...], passed: int, weight: Fraction
    ) -> Fraction:
        """Count what the attributes of a node own; returns the share of the tokens that reach its body."""
        width = self.width
        inner = weight * per_turn(attrs, "res", passed) * per_turn(attrs, "cap", passed)
        for attr in attrs:
            params, flops, share = 0, 0.0, weight
            match attr.name, attr.value:
                case (("emb" | "norm"), _):
                    params = width
                case "inject", (_, "concat"):
                    params, flops, share = 2 * width**2, 4.0 * width**2, inner
                case "gate", kind:
                    params = {"scalar": 1, "vector": width, "token": width + 1}[str(kind)]
                    flops = 2.0 * width if kind == "token" else 0.0
                case (("cap" | "down"), kind) if kind != "mean":
                    params, flops = width, 2.0 * width
                case _:
                    continue
            own = self.plan.owned.get((attr.name, node, turn))
            self.owned[(own.name,) if own is not None else (attr.name, *node, passed)] = params
            self.flops += flops * float(share)
        return inner

    def visit(self, visit: Visit, weight: Fraction) -> Fraction:
        """Count one visit; returns its share of a layer in parts."""
        layer = self.layers[visit.key.layer]
        self.visits += 1
        # tokens that were pooled away or passed by leave neither keys nor cache entries
        present = int(self.context * weight)
        self.stored.update((visit.key, part) for part in visit.parts)
        flops = float(sum(layer.flops[part] for part in visit.parts))
        if "a" in visit.parts:
            flops += layer.flops_per_key * layer.keys(present)
        if visit.slot is not None:
            self.cached[visit.slot] = max(layer.cache(present), self.cached.get(visit.slot, 0.0))
            if not visit.writes and not self.kv_shared_computed:
                flops -= layer.kv_flops
        if visit.lora is not None:
            rank = visit.lora.value
            assert isinstance(rank, int)
            if any(part not in layer.linears for part in visit.parts):
                reason = f"lora has no cost: the shapes of the linears of layer {visit.key.layer} are not known"
                raise ProgramError(reason, self.plan.text)
            # no matrix has a higher rank than its smaller side
            sizes = (min(rank, i, o) * (i + o) for part in visit.parts for i, o in layer.linears[part])
            size = sum(sizes)
            self.owned[(visit.lora.name,)] = size
            flops += 2.0 * size
        self.flops += flops * float(weight)
        return Fraction(len(visit.parts), len(layer.params))
