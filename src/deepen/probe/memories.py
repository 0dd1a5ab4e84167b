"""Feed-forwards read as memories, neuron by neuron: what makes each fire, what it speaks for, and how many do.

    f(x) = sum_i m_i v_i + b        m_i: coefficient of memory i, v_i: its value, a column of the output matrix
    a_i = |m_i| |v_i|               how much memory i writes

    active        memories with m_i other than 0 at a token, which is few for ReLU and nearly all for smooth activations
    effective     (sum_i a_i)^2 / sum_i a_i^2: as many memories of one size would write as unevenly
    agreement     of all memories, the share whose value speaks for the token that follows their top trigger

The top trigger of a memory is the token of the text with its largest |m_i|, and the token it speaks for is the row of
the head with the largest product with sign(m_i) v_i there. Memories whose top trigger ends a window are not counted.
One pass without the head reads all visits; agreement takes m products of the head for each.

Geva, Schuster, Berant, Levy, Transformer Feed-Forward Layers Are Key-Value Memories, arXiv:2012.14913. The sign and the
effective number are for activations that are not ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deepen.errors import FamilyError, UsageError
from deepen.probe.scores.memory import firing, head_rows
from deepen.registry import method

if TYPE_CHECKING:
    import torch

    from deepen.probe.scores.reading import Reading

# Memories whose values meet the head at once.
ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """One memory.

    Attributes:
        visit: the visit it belongs to.
        neuron: its number in the feed-forward.
        speaks: the tokens its value has the largest products with, for the sign of its largest coefficient.
        fires: the texts that end with the tokens of its largest coefficients, and these.
        follows: the token after its top trigger; None where the trigger ends a window.
    """

    visit: int
    neuron: int
    speaks: tuple[str, ...]
    fires: tuple[tuple[str, float], ...]
    follows: str | None


@dataclass(frozen=True, kw_only=True)
class Memories:
    """The memories of one visit; see the head of the file.

    Attributes:
        visit: the visit.
        layer: the layer it runs.
        count: how many memories it has.
        active: mean number at a token.
        effective: mean effective number at a token.
        agreement: share of the memories; None where no trigger has a token behind it.
        compared: memories that the agreement is taken over.
        neurons: those with the largest |m_i| |v_i| anywhere in the text, strongest first.
    """

    visit: int
    layer: str
    count: int
    active: float
    effective: float
    agreement: float | None
    compared: int
    neurons: tuple[Neuron, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return asdict(self)


@method(
    "key-value-memories",
    family="probe",
    source="arXiv:2012.14913",
    title="Transformer Feed-Forward Layers Are Key-Value Memories",
    mechanism="what makes each neuron fire, the tokens it speaks for, how often the two agree, how many are active",
    cost="1 pass, and m products of the head for each visit",
)
def memories(
    reading: Reading, visits: Sequence[int], neurons: int = 5, top: int = 5, before: int = 8
) -> list[Memories]:
    """The memories of some visits, in one pass over the text.

    Args:
        reading: what to read; it needs a head.
        visits: the visits to look at.
        neurons: how many memories of each visit are listed.
        top: how many tokens and texts of each.
        before: tokens of context shown with a text, the one that fires included.

    Raises:
        UsageError: no such visit.
        FamilyError: the model has no head, or a visit no feed-forward with one output matrix.
    """
    import torch

    for visit in visits:
        if not 0 <= visit < reading.depth:
            raise UsageError(f"visit {visit} does not exist; the program has {reading.depth}: 0-{reading.depth - 1}")
    head = head_rows(reading)
    found = {visit: _Read(top) for visit in visits}
    ids: list[list[int]] = []
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with torch.inference_mode():
        with firing(reading, lambda at, m, v: seen.update({at: (m, v)}) if at in found else None):
            for group, _ in reading.groups():
                reading.run(group)
                if missing := found.keys() - seen.keys():
                    raise FamilyError(
                        f"visit {min(missing)} has no feed-forward with one output matrix, so it has no such memories"
                    )
                for visit, (m, v) in seen.items():
                    found[visit].add(m.flatten(0, 1).float(), v, sum(map(len, ids)))
                seen.clear()
                ids += group.tolist()
                reading.step(len(group))
        return [_told(reading, visit, each, head, ids, neurons, before) for visit, each in found.items()]


@dataclass
class _Read:
    """What is known of the memories of a visit so far.

    Attributes:
        top: coefficients kept of each memory.
        best: the largest of them, [top, m].
        place: the numbers of their tokens, [top, m].
        values: of the memories, [m, d].
    """

    top: int
    best: Any = None
    place: Any = None
    values: Any = None
    tokens: int = 0
    active: float = 0.0
    effective: float = 0.0
    sizes: Any = field(default=None, repr=False)

    def add(self, m: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Takes the coefficients of further tokens, [n, m], of which the first has number `start`."""
        import torch

        self.values, self.sizes = values, values.float().norm(dim=-1)
        wrote = m.abs() * self.sizes
        squares = wrote.square().sum(-1)
        shares = torch.where(squares > 0, wrote.sum(-1).square() / squares, 0.0)
        self.tokens += len(m)
        self.active += (m != 0).sum().item()
        self.effective += shares.double().sum().item()
        place = torch.arange(start, start + len(m), device=m.device)[:, None].expand_as(m)
        if self.best is not None:
            m, place = torch.cat((self.best, m)), torch.cat((self.place, place))
        order = m.abs().topk(min(self.top, len(m)), 0).indices
        self.best, self.place = m.gather(0, order), place.gather(0, order)


def _told(
    reading: Reading, visit: int, found: _Read, head: torch.Tensor, ids: list[list[int]], neurons: int, before: int
) -> Memories:
    signed = found.best[0].sign()[:, None] * found.values
    follows = [_following(ids, place) for place in found.place[0].tolist()]
    spoken = [token for rows in signed.to(head.dtype).split(ROWS) for token in (rows @ head.mT).argmax(-1).tolist()]
    pairs = [token == after for token, after in zip(spoken, follows, strict=True) if after is not None]
    order = (found.best[0].abs() * found.sizes).topk(min(neurons, len(spoken))).indices.tolist()
    decode = reading.tokenizer.decode
    listed = [
        Neuron(
            visit=visit,
            neuron=neuron,
            speaks=tuple(
                str(decode([token])) for token in (head @ signed[neuron].to(head.dtype)).topk(found.top)[1].tolist()
            ),
            fires=tuple(
                (str(decode(_ending(ids, place, before))), size)
                for place, size in zip(found.place[:, neuron].tolist(), found.best[:, neuron].tolist(), strict=True)
            ),
            follows=None if (after := follows[neuron]) is None else str(decode([after])),
        )
        for neuron in order
    ]
    return Memories(
        visit=visit,
        layer=str(reading.visits.entries[visit].visit.key),
        count=len(spoken),
        active=found.active / found.tokens,
        effective=found.effective / found.tokens,
        agreement=sum(pairs) / len(pairs) if pairs else None,
        compared=len(pairs),
        neurons=tuple(listed),
    )


def _ending(windows: list[list[int]], place: int, before: int) -> list[int]:
    """The tokens up to number `place` of all that were read, no more than `before` and of its window."""
    window, at = _window(windows, place)
    return window[max(0, at + 1 - before) : at + 1]


def _following(windows: list[list[int]], place: int) -> int | None:
    """The token behind number `place`; None at the end of its window."""
    window, at = _window(windows, place)
    return window[at + 1] if at + 1 < len(window) else None


def _window(windows: list[list[int]], place: int) -> tuple[list[int], int]:
    for ids in windows:
        if place < len(ids):
            return ids, place
        place -= len(ids)
    raise AssertionError("a token beyond the text")


def contributions(m: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What each memory adds to the output, m_i v_i; with the bias they sum to it.

    Args:
        m: coefficients, [..., m].
        values: [m, d].

    Returns:
        [..., m, d].
    """
    return m[..., None] * values
