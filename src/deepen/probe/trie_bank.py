"""A model whose bank is loaded once and visited by many programs.

    ids -> embedding -> [ visits ] -> norm, head -> logits        the model's own forward

What a layer is called with (masks, rotary tables) depends on the layer's kind, not on its place. So a pass in which
nobody runs a layer collects the calls; the visits of any program are then run with them; and the model's own forward,
with visits that hand the finished stream through, ends the pass.

Where this does not hold the first window shows it: two programs run both ways must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepen.checkpoint.views import without
from deepen.checkpoint.visit import Entry, Forked, VisitList, given_cache, map_stream, operate
from deepen.probe.once import read_once
from deepen.probe.trie_tapes import Move, Step, moves_of, steps
from deepen.program import Plan, Program

if TYPE_CHECKING:
    from torch import nn

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedModel

Call = tuple[tuple[Any, ...], dict[str, Any]]
Form = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class State:
    """The stream after some moves and the forks that are open."""

    stream: torch.Tensor
    forks: tuple[Forked, ...] = ()


@dataclass(frozen=True)
class Start:
    """The start of a pass: the embedded tokens, [b, t, d], and what each layer is called with."""

    stream: torch.Tensor
    calls: Mapping[int, Call]


class Bank:
    """A checkpoint loaded with every layer of its default tower once.

    Args:
        ck: the checkpoint; its program does not matter.
        dtype: as for `Checkpoint.load`.
        device: where the weights go.

    Attributes:
        model: the loaded model.
        reason: why visits cannot be run outside of the model's forward; None before `examine`, empty when they can.
    """

    def __init__(self, ck: Checkpoint, *, dtype: Any = None, device: str = "cpu") -> None:
        ck.require_layers()
        self.tower = ck.family.tower("")
        self.depth = ck.depth[self.tower.name]
        self.checkpoint = read_once(ck).apply(Program.identity(self.depth))
        self.options = {"dtype": dtype, "device": device}
        self.model: PreTrainedModel = self.checkpoint.load(**self.options)
        self.visits = next(
            module
            for module in self.model.modules()
            if isinstance(module, VisitList) and module.tower.name == self.tower.name
        )
        self.identity = self.visits.entries
        self.reason: str | None = None
        self._plans: dict[str, Plan] = {}
        self._forms: dict[int, Form] = {}
        self._partial: dict[tuple[int, str], nn.Module] = {}

    def plan(self, program: Program | str) -> Plan:
        """The plan of a program over this bank.

        Raises:
            ProgramError: the program does not fit, or asks for something that is not executed.
            FamilyError: the family cannot do what it asks for.
        """
        text = str(program)
        if text not in self._plans:
            applied = self.checkpoint.apply(program)
            # it depends on the config alone, and building it for each program would cost more than a short window
            vars(applied)["skeleton"] = self.checkpoint.skeleton
            applied.require_executable()
            self._plans[text] = applied.plan()
        return self._plans[text]

    @contextmanager
    def showing(self, entries: Iterable[Any], plan: Plan | None = None) -> Iterator[PreTrainedModel]:
        """The model with other visits, and the config that goes with them."""
        self.visits.entries = tuple(entries)
        try:
            yield self.model
        finally:
            self.visits.entries = self.identity
            if plan is not None:
                self.visits.live.follow([entry.visit for entry in self.identity])

    @contextmanager
    def running(self, plan: Plan) -> Iterator[PreTrainedModel]:
        """The model as it runs this plan: with the loaded layers, or loaded anew where those do not do."""
        if self.tower.first or plan.owned or any(init != "copy" for init in plan.inits.values()):
            yield self.checkpoint.apply(plan.text).load(**self.options)
            return
        layers = [self.layer(key.layer) for key in plan.keys]
        own = VisitList(layers, plan, self.tower, self.visits.live)
        with self.showing(own.entries, plan) as model:
            yield model

    def layer(self, number: int) -> nn.Module:
        """A layer of the bank."""
        return self.identity[number].layer

    def start(self, ids: torch.Tensor) -> Start:
        """Embeds the tokens and collects the calls of the layers, without running any.

        Args:
            ids: [b, t].
        """
        doors = [_Through(entry, self._forms[at]) for at, entry in enumerate(self.identity)]
        with self.showing(doors):
            self.model.base_model(input_ids=ids, use_cache=False)
        return Start(doors[0].stream, {at: door.call for at, door in enumerate(doors)})

    def run(self, start: Start, state: State, moves: Sequence[Move]) -> State:
        """The state after some more moves; the one given stays as it is."""
        stream = state.stream
        forks: list[Forked] = [(entry, list(branches)) for entry, branches in state.forks]
        for move in moves:
            if isinstance(move, Step):
                args, kwargs = map_stream(*start.calls[move.layer], lambda _, now=stream: now)
                out = self._visitor(move)(*args, **kwargs)
                stream = out[0] if isinstance(out, (tuple, list)) else out
            else:
                stream = operate((move,), stream, forks, {})
        return State(stream, tuple(forks))

    def finish(self, stream: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The logits [b, t, vocabulary] of the model whose last visit gave this stream."""
        doors = [_Through(entry, self._forms[at], stream) for at, entry in enumerate(self.identity)]
        with self.showing(doors) as model:
            return model(input_ids=ids, use_cache=False).logits

    def examine(self, ids: torch.Tensor) -> int:
        """Finds out whether visits can be run outside of the model's forward, and says why not in `reason`.

        Args:
            ids: the first window, [1, t].

        Returns:
            Visits that this took.
        """
        taken = 0
        for reason, visits in self._doubts(ids):
            taken += visits
            self.reason = reason
            if reason:
                break
        return taken

    def _doubts(self, ids: torch.Tensor) -> Iterator[tuple[str, int]]:
        """What may stand against it, an empty text where it does not, and the visits it took to find out."""
        if self.tower.first:
            yield f"only the first layer executed holds {self.tower.first[0]}", 0
        watched = [_Watched(entry) for entry in self.identity]
        with self.showing(watched) as model:
            whole = model(input_ids=ids, use_cache=False).logits
        yield next((reason for watch in watched if (reason := watch.doubt)), ""), self.depth
        self._forms = {at: watch.form for at, watch in enumerate(watched)}
        # every layer at another place than its own, and one twice
        order = [at + 1 if at % 2 == 0 and at + 1 < self.depth else at - at % 2 for at in range(self.depth)]
        moved = self.plan(" ".join(map(str, [*order, order[-1]])))
        with self.running(moved) as model:
            expected = model(input_ids=ids, use_cache=False).logits
        start = self.start(ids)
        for plan, wanted in ((self.plan(self.checkpoint.program), whole), (moved, expected)):
            moves = moves_of(plan)
            assert moves is not None
            got = self.finish(self.run(start, State(start.stream), moves).stream, ids)
            same = torch.equal(got.nan_to_num(), wanted.nan_to_num())
            family = self.checkpoint.family.model_type
            yield "" if same else f"a layer of {family} depends on more than the stream and its kind", 2 * steps(moves)

    def _visitor(self, step: Step) -> nn.Module:
        parts = self.tower.parts
        missing = "".join(letter for letter in parts.letters if letter not in step.parts)
        if not missing:
            return self.layer(step.layer)
        key = step.layer, step.parts
        if key not in self._partial:
            self._partial[key] = without(self.layer(step.layer), parts, missing)
        return self._partial[key]


class _Watched:
    """An entry that notes how its layer is called and returns the stream."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.calls, self.doubt = entry, 0, ""
        self.form: Form = _bare

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["entry"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.entry(*args, **kwargs)
        self.calls += 1
        if isinstance(out, (tuple, list)):
            kind, rest = type(out), tuple(out[1:])
            self.form = lambda stream: kind((stream, *rest))
            if any(extra is not None for extra in rest):
                self.doubt = f"{self.entry} hands on more than the stream"
        if self.calls > 1:
            self.doubt = f"{self.entry} is called {self.calls} times in a pass"
        if given_cache(args, kwargs) is not None:
            self.doubt = f"{self.entry} is given a cache in a pass without one"
        return out


class _Through:
    """Stands for an entry: keeps its call and hands a stream on, that of the call or one that is given."""

    def __init__(self, entry: Entry, form: Form, stream: torch.Tensor | None = None) -> None:
        self.entry, self.form, self.given = entry, form, stream
        self.call: Call = (), {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["entry"], name)

    @property
    def stream(self) -> torch.Tensor:
        """What the call brought."""
        args, kwargs = self.call
        return args[0] if args else kwargs["hidden_states"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.call = args, kwargs
        return self.form(self.stream if self.given is None else self.given)


def _bare(stream: torch.Tensor) -> Any:
    return stream
