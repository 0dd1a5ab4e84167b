"""The native model: a bank of layers, a program that says which runs when, and a wiring between them.

tokens -> embedding -> wiring.init -> tape -> wiring.finish -> final norm -> head -> logits

one visit:   for each site of the visit
read  = wiring.read(state, site)
y     = layer[part](read)               norm and sublayer
state = wiring.write(state, site, read, y, norm)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepen.errors import UsageError
from deepen.program import (
    Back,
    Blend,
    Enter,
    Fork,
    Gate,
    Grad,
    Join,
    Op,
    Plan,
    Program,
    Record,
    Run,
    Visit,
)  # fmt: skip
from deepen.program.site import Site, depth, sites
from deepen.program.stored import stored_text
from deepen.registry import lookup
from deepen.stack.cache import Cache, PassSlot
from deepen.stack.config import StackConfig
from deepen.stack.counts import drawn_counts
from deepen.stack.grams import Grams
from deepen.stack.heads import make_head, make_input, pooled
from deepen.stack.init import initialise
from deepen.stack.layer import Layer, make_norm
from deepen.stack.masks import PassMasks
from deepen.stack.owned import Owned
from deepen.stack.parametrisation import Place, Rule, Scale
from deepen.stack.rotary import Rotary
from deepen.stack.table import require
from deepen.sublayers.contract import Context, Read
from deepen.wiring.base import Earlier, Shape, State, Wiring

# What a hook gets: where, what (`read`, `update` or `stream`) and the tensor; it may return another in its place.
Hook = Callable[[Site, str, torch.Tensor], torch.Tensor | None]
# By name and index of the site.
Stats = dict[tuple[str, int], torch.Tensor]


@dataclass(slots=True)
class Result:
    """What a forward pass gives.

    Attributes:
        logits: (B, T, vocabulary), or of the last tokens alone when asked.
        stream: (B, T, D), after the final norm.
        marks: the stream (B, T, D) at each label and exit of the program.
        losses: what sublayers add to the training loss, by name, summed over sites.
        stats: what sublayers tell of this pass, by name and by the index of the site.
    """

    logits: torch.Tensor
    stream: torch.Tensor
    marks: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Pass:
    """What one forward pass carries beside the state."""

    tokens: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    masks: PassMasks
    cache: Cache | None
    earlier: Earlier
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


class Stack(nn.Module):
    """A model whose depth is a program.

    Args:
        config: what to build; the stored configuration has a program without copies, which are layers of their own.
        seed: of the initial values; None leaves torch's generator as it is.

    Raises:
        ProgramError: a program that does not fit the layers or the wiring.

    Example:
        >>> config = StackConfig(layers=4, program="0 (1-2)*2 3", width=64, heads=4)
        >>> Stack(config, seed=0)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """

    def __init__(self, config: StackConfig, seed: int | None = 0) -> None:
        super().__init__()
        drawn = torch.random.get_rng_state()
        name, options = config.wiring_options
        kind: Any = lookup(name).implementation
        program = Program.identity(config.layers) if config.program is None else Program.parse(config.program)
        written = program.plan(config.layers, ["af"] * config.layers)
        require(written, name, kind)
        windows = tuple(config.window_of(key.layer) for key in written.keys)
        window = windows if len(set(windows)) > 1 else windows[0]
        self.config = config.model_copy(
            update={"layers": len(written.keys), "program": stored_text(written), "window": window}
        )
        self.written = written
        self.visits_plan = Program.parse(self.config.program or "").plan(len(windows), ["af"] * len(windows))
        self.sites = sites(self.visits_plan)
        self.embedding = make_input(config)
        self.grams = Grams(config.grams, config.gram_rows, config.width) if config.grams else None
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.rotary = Rotary(config.head, config.rotary_base) if config.positions == "rotary" else None
        self.layers = nn.ModuleList(Layer(config, window, kind) for window in windows)
        every = [site for own in self.sites for site in own]
        if config.depth is not None and len(config.depth.places) != len(every):
            raise UsageError(f"depth is of a program of {len(config.depth.places)} sites, this one has {len(every)}")
        shape = Shape(
            width=config.width,
            sites=every,
            layers=len(windows),
            visits=len(self.sites),
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_width=config.head,
            eps=config.eps,
            depth=config.depth or depth(every, len(windows), len(self.sites)),
        )
        self.wiring: Wiring = kind(shape, **options)
        self.plan: Plan = self.wiring.plan(self.visits_plan)
        self.owned = Owned(self.plan, self.layers, config.width)
        self.norm = make_norm(config) if kind.final else nn.Identity()
        self.head = make_head(config)
        if config.tied:
            self.head.weight = self.embedding.weight
        rule, choices = config.parametrisation_options
        made: Any = lookup(rule).implementation
        self.rule: Rule = made(Scale(width=config.width, depth=shape.blocks, tied=config.tied), **choices)
        self._factors = [self.rule.factors(replace(site, index=shape.depth.ranks[site.index])) for site in every]
        self._logits_factor = self.rule.record(Place(kind="head")).forward
        self.checkpointing = False
        self.hooks: list[Hook] = []
        self._tapes: dict[tuple[tuple[int, int], ...], tuple[Op, ...]] = {}
        self._read_by_others = {visit.slot for visit in self.plan.visits if visit.slot is not None and not visit.writes}
        initialise(self, seed)
        if seed is not None:
            torch.random.set_rng_state(drawn)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        valid: torch.Tensor | None = None,
        counts: Mapping[int, int] | None = None,
        last: int | None = None,
    ) -> Result:
        """The logits of the next token at each position.

        Args:
            tokens: (B, T) ids; with a cache, those after the ones that it holds. Images (B, C, H, W) or series
                (B, C, T) where the configuration says so; logits are then (B, classes).
            cache: keys and values of earlier tokens, from `new_cache`; the new ones are added to it.
            valid: (B, T), False where a token is padding; None when none is. With a cache, of the new tokens.
            counts: how often run-time loops run, by number; by default drawn in training where the program says how,
                else the maximum.
            last: give logits of so many last positions only; 0 gives none.

        Raises:
            ProgramError: a count outside the range of its loop.
            UsageError: more tokens than learned positions, an input of another form, a cache that holds tokens of
                other loop counts, or one for a stack of classes.
        """
        if cache is not None and self.config.output == "classes":
            raise UsageError("a stack of classes reads its whole input at once; it takes no cache")
        chosen = self._counts(counts, cache)
        past = 0 if cache is None else cache.length
        x, pass_ = self._begin(tokens, cache, past, valid)
        marks: dict[str, torch.Tensor] = {}
        state = self._run(self._tape(chosen), self.wiring.init(x, pass_.earlier), pass_, marks)
        stream = marks["main"] if "main" in marks else self.wiring.finish(state)
        if cache is not None:
            cache.length += tokens.shape[1]
            cache.memory = pass_.earlier.kept or {}
        stream = self.norm(stream)
        read = stream if last is None else stream[:, tokens.shape[1] - last :]
        return Result(self._logits(read), stream, marks, pass_.losses, pass_.stats)

    def exit(self, marks: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """The logits that the final norm and the head give at a mark.

        Raises:
            UsageError: the program has no such mark.
        """
        if name not in marks:
            raise UsageError(f"no mark {name!r} was passed; the program has {', '.join(marks) or 'none'}")
        return self._logits(self.norm(marks[name]))

    def new_cache(self, room: int = 64) -> Cache:
        """An empty cache with room for so many tokens; it grows by itself."""
        return Cache(self.plan.slots, room)

    def set_step(self, step: int) -> None:
        """Tells the wiring and the feed-forwards how many steps of training are done."""
        self.wiring.set_step(step)
        for layer in self.layers:
            feed_forward: Any = layer.get_submodule("f.sublayer")
            feed_forward.set_step(step)

    def on_site(self, hook: Hook) -> Callable[[], None]:
        """Calls `hook(site, what, tensor)` with what each site reads, its update and, after it, the stream.

        A tensor that it returns for `read` or `update` takes the place of the one that it got.

        Returns:
            A function that takes the hook away.
        """
        self.hooks.append(hook)
        return lambda: self.hooks.remove(hook)

    def _begin(
        self, tokens: torch.Tensor, cache: Cache | None, past: int, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, Pass]:
        """The embedding (B, T, D) and what the visits of this pass share."""
        x = self.embedding(tokens)
        length = x.shape[1]
        if cache is not None and (valid is not None or cache.valid is not None):
            valid = cache.extended(valid, tokens)
        new = None if valid is None else valid[:, -length:]
        earlier = Earlier(new) if cache is None else Earlier(new, cache.memory, {})
        if self.grams is not None:
            x = x + self.grams(tokens, earlier)
        positions = None if valid is None else (valid.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        if self.positions is not None:
            if past + length > self.config.context:
                raise UsageError(
                    f"{past + length} tokens, but the model has learned {self.config.context} positions; give it fewer"
                )
            where = torch.arange(past, past + length, device=tokens.device) if positions is None else positions
            x = x + self.positions(where)
        rotary = None if self.rotary is None else self.rotary(past, length, positions, x)
        masks = PassMasks(length, past, self.config.causal, valid, tokens.device)
        return x, Pass(tokens, rotary, masks, cache, earlier)

    def _run(self, tape: Sequence[Op], state: State, pass_: Pass, marks: dict[str, torch.Tensor]) -> State:
        """The state after a tape."""
        forks: list[tuple[State, list[State]]] = []
        without = 0
        for op in tape:
            if isinstance(op, Grad):
                without += -1 if op.on else 1
                continue
            with torch.no_grad() if without else nullcontext():
                state = self._step(op, state, pass_, marks, forks)
        return state

    def _step(
        self,
        op: Op,
        state: State,
        pass_: Pass,
        marks: dict[str, torch.Tensor],
        forks: list[tuple[State, list[State]]],
    ) -> State:
        """The state after one operation; open forks and marks are updated."""
        wiring, owned = self.wiring, self.owned
        if isinstance(op, Run):
            if self.checkpointing and self.training and torch.is_grad_enabled():
                state, losses, stats = checkpoint(self._visit, op.visit, state, pass_, use_reentrant=False)
            else:
                state, losses, stats = self._visit(op.visit, state, pass_)
            for name, loss in losses.items():
                pass_.losses[name] = pass_.losses[name] + loss if name in pass_.losses else loss
            for (name, index), stat in stats.items():
                pass_.stats.setdefault(name, {})[index] = stat
        elif isinstance(op, Fork):
            forks.append((state, []))
        elif isinstance(op, Back):
            entry, branches = forks[-1]
            branches.append(state)
            state = entry
        elif isinstance(op, Join):
            entry, branches = forks.pop()
            weight = 1.0 if op.comb == "sum" else 1 / (len(branches) + 1)
            state = wiring.combine([entry, *branches, state], [weight] * (len(branches) + 1))
        elif isinstance(op, Blend):
            state = wiring.combine([forks.pop()[0], state], [op.scale])
        elif isinstance(op, Gate):
            entry, _ = forks.pop()
            state = wiring.combine([entry, state], [owned.factor(op.own, wiring.readout(entry))])
        elif isinstance(op, Enter):
            state = wiring.change(state, owned.entry(op.own, marks))
        elif isinstance(op, Record):
            marks[op.name] = wiring.readout(state)
        return state

    def _visit(self, visit: Visit, state: State, pass_: Pass) -> tuple[State, dict[str, torch.Tensor], Stats]:
        """One visit: each part of the layer reads from the state and writes back; also the losses of its parts."""
        total: dict[str, torch.Tensor] = {}
        told: Stats = {}
        wiring, layer = self.wiring, self.layers[visit.key.layer]
        for site in self.sites[visit.index]:
            part: Any = layer._modules[site.part]
            read = wiring.read(state, site)
            if self.hooks:
                read = read._replace(u=self._hooked(site, "read", read.u))
            context = Context(
                site=site,
                rotary=pass_.rotary,
                masks=pass_.masks,
                slot=self._slot(visit, pass_, state, site, read) if site.part == "a" else None,
                adapters=self.owned.adapters(visit.lora, site.part),
                tokens=pass_.tokens,
                on_keys=wiring.on_keys(state, site, read) if site.part == "a" else None,
                beside=wiring.beside(state, site) if site.part == "a" else None,
                valid=pass_.earlier.valid,
            )
            inner, outer = self._factors[site.index]
            y, losses, stats = part(read, context, inner)
            if outer != 1:
                y = y * outer
            for name, loss in losses.items():
                total[name] = total[name] + loss if name in total else loss
            for name, stat in stats.items():
                told[name, site.index] = stat
            if self.hooks:
                y = self._hooked(site, "update", y)
            state = wiring.write(state, site, read, y, part.after)
            if self.hooks:
                self._hooked(site, "stream", wiring.readout(state))
        return state, total, told

    def _logits(self, stream: torch.Tensor) -> torch.Tensor:
        logits = self.head(pooled(self.config, stream))
        return logits if self._logits_factor == 1 else logits * self._logits_factor

    def _counts(self, counts: Mapping[int, int] | None, cache: Cache | None) -> tuple[tuple[int, int], ...]:
        """How often each run-time loop runs in this pass."""
        if counts is None and cache is not None and cache.counts is not None:
            return cache.counts
        chosen = dict(counts or {})
        if counts is None and self.training and cache is None:
            chosen = drawn_counts(self.plan)
        found = tuple(sorted(chosen.items()))
        if cache is not None:
            if cache.counts is not None and cache.counts != found:
                raise UsageError(
                    f"the cache holds tokens of the loop counts {dict(cache.counts)}, not {chosen}; start a new cache"
                )
            cache.counts = found
        return found

    def _tape(self, counts: tuple[tuple[int, int], ...]) -> tuple[Op, ...]:
        if counts not in self._tapes:
            self._tapes[counts] = self.plan.tape(dict(counts))
        return self._tapes[counts]

    def _slot(self, visit: Visit, pass_: Pass, state: State, site: Site, read: Read) -> Any:
        if visit.slot is None:
            return None
        if pass_.cache is not None:
            return pass_.cache.slot(visit.slot, visit.writes, pass_.masks.new)
        if (slot := self.wiring.slot(state, site, read)) is not None:
            return slot
        return PassSlot(pass_.shared, visit.slot, visit.writes) if visit.slot in self._read_by_others else None

    def _hooked(self, site: Site, what: str, tensor: torch.Tensor) -> torch.Tensor:
        for hook in self.hooks:
            changed = hook(site, what, tensor)
            tensor = tensor if changed is None else changed
        return tensor
