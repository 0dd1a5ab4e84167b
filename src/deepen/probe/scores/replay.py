"""Running a model again with some visits answered from the pass before.

    pass      h_0 -> [0] -> h_1 -> [1] -> h_2 -> [2] -> h_3        what each visit returned is kept, for one batch
    replay    .      kept   .      changed       [2] -> h_3'       visits before the changed one cost nothing

So the model without one visit costs, on average over the visits, half a pass. Forks, joins and scales of the program
are done anew, with what the visits returned. Visits that share keys and values (`kv=first`) are always run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepen.probe.scores.reading import stream_of

if TYPE_CHECKING:
    from deepen.checkpoint.visit import Entry, VisitList


@dataclass(eq=False)
class Kept:
    """What the visits of one pass were given and returned; as many streams as visits, of one batch.

    Attributes:
        given: the stream before each visit, [b, t, d].
        returned: all that its layer returned.
    """

    given: list[torch.Tensor] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)

    def update(self, visit: int) -> torch.Tensor:
        """What a visit added to the stream, [b, t, d], in fp32."""
        return stream_of(self.returned[visit]).float() - self.given[visit].float()


class Given(nn.Module):
    """Answers a visit with what is known."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.out


class Heard(nn.Module):
    """Runs a visit and tells what it was given and what it returned."""

    def __init__(self, inner: nn.Module, tell: Callable[[torch.Tensor, Any], None]) -> None:
        super().__init__()
        # a tuple, so that the layer is no child of this
        self.inner, self.tell = (inner,), tell

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner[0](*args, **kwargs)
        self.tell(args[0] if args else kwargs["hidden_states"], out)
        return out


@contextmanager
def standing_in(visits: VisitList, modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Runs `modules` in place of the layers of these visits; the layers themselves stay as they are."""
    original = visits.entries
    visits.entries = tuple(_with(entry, modules[at]) if at in modules else entry for at, entry in enumerate(original))
    try:
        yield
    finally:
        visits.entries = original


@contextmanager
def keeping(visits: VisitList) -> Iterator[Kept]:
    """Keeps what each visit of the pass inside returns."""
    kept = Kept()

    def tell(given: torch.Tensor, out: Any) -> None:
        kept.given.append(given)
        kept.returned.append(out)

    with standing_in(visits, {at: Heard(runs(entry), tell) for at, entry in enumerate(visits.entries)}):
        yield kept


def runs(entry: Entry) -> nn.Module:
    """The module that a visit runs: its layer, or a view of it without some part."""
    return entry.own or entry.layer


def before(visits: VisitList, kept: Kept, visit: int) -> dict[int, nn.Module]:
    """Answers for all visits before one."""
    return {at: Given(kept.returned[at]) for at in range(visit) if not visits.entries[at].shared}


def skipped(kept: Kept, visit: int, first: int = 0) -> Given:
    """Answers a visit with the stream that it was given, from token `first` on."""
    stream = kept.given[visit]
    if first:
        stream = torch.cat((stream_of(kept.returned[visit])[:, :first], stream[:, first:]), 1)
    return Given(with_stream(kept.returned[visit], stream))


def with_stream(out: Any, stream: torch.Tensor) -> Any:
    """What a layer returned, with another stream."""
    return type(out)((stream, *out[1:])) if isinstance(out, (tuple, list)) else stream


def _with(entry: Entry, module: nn.Module) -> Entry:
    changed = copy.copy(entry)
    changed.own = module
    return changed
