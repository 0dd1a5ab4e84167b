"""What a search method sees: where it starts, what it may do, and how good a candidate is.

    method -- candidates --> ask -- one trie of those not known yet --> losses -- state file --> method

A method is a function of a `Problem`. It asks for losses until it is done, or `ask` raises `Finished` because all
candidates or minutes are used up. It draws from `dice` only, so that the same losses give the same search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from deepen.adaptive.search.budget import Meter
from deepen.adaptive.search.moves import Bank, Items, Move, drop, neighbours, part, text_of
from deepen.adaptive.search.state import Candidate, State
from deepen.errors import DeepenError
from deepen.program import Program

# Programs evaluated at a time: a killed search loses at most these.
ROUND = 64


class Finished(Exception):
    """No more candidates may be evaluated."""


# Texts of programs -> their losses.
Evaluate = Callable[[Sequence[str]], Sequence[float]]


@dataclass
class Problem:
    """A search for the program of least loss whose cost is at most `limit`.

    Attributes:
        whole: the model's own program, which every method may start from.
        bank: the layers there are.
        moves: the moves that are allowed, by name.
        measure: the cost of a candidate.
        limit: the cost that the best may have.
        dice: all randomness.
        state: what is known.
        evaluate: the losses of programs on the text that is searched on, in nats.
        distances: block distances [L, L + 1] of the whole model, for the rule that needs them.
        candidates: how many may be evaluated in all; None for as many as the method wants.
        deadline: when the time is up, by `time.monotonic`.
        report: called after each round.
        legal: refuses, with a DeepenError, what the model cannot run.
    """

    whole: Items
    bank: Bank
    moves: Mapping[str, Move]
    measure: Meter
    limit: float
    dice: Random
    state: State
    evaluate: Evaluate
    distances: Callable[[], Sequence[Sequence[float]]]
    candidates: int | None = None
    deadline: float = math.inf
    report: Callable[[Problem], None] = lambda problem: None
    legal: Callable[[str], object] = lambda text: None
    asked: dict[str, float] = field(default_factory=dict)

    def ask(self, wanted: Sequence[Items]) -> list[float]:
        """The losses of some candidates, infinite where the model cannot run one or its logits are not finite.

        Raises:
            Finished: not all of them may be evaluated; those that may are known to the state.
        """
        texts = [normal(items) for items in wanted]
        fresh = [text for text in dict.fromkeys(texts) if text not in self.asked]
        costs = {normal(items): self.measure(items) for items in wanted}
        for at in range(0, len(fresh), ROUND):
            room = math.inf if self.candidates is None else self.candidates - len(self.asked)
            some = fresh[at : at + ROUND][: int(min(room, ROUND))]
            if not some:
                raise Finished
            # what is known costs no time, so that a search which is continued gets as far as it was
            unknown = self._noted(some)
            if unknown:
                if time.monotonic() >= self.deadline:
                    raise Finished
                self._evaluate(unknown, costs)
                self._noted(unknown)
            self.report(self)
        if any(text not in self.asked for text in texts):
            raise Finished
        return [self.asked[text] for text in texts]

    def _noted(self, texts: Sequence[str]) -> list[str]:
        """Counts the candidates that are known as asked for; returns the others."""
        known = self.state.candidates
        self.asked |= {text: known[text].nll for text in texts if text in known}
        return [text for text in texts if text not in known]

    def _evaluate(self, texts: Sequence[str], costs: Mapping[str, float]) -> None:
        legal = [text for text in texts if self._runs(text)]
        found = dict(zip(legal, self.evaluate(legal), strict=True)) if legal else {}
        self.state.add([Candidate(text, found.get(text, math.inf), costs[text]) for text in texts])

    def _runs(self, text: str) -> bool:
        try:
            self.legal(text)
        except DeepenError:
            return False
        return True

    def left(self) -> float:
        """Candidates that may still be evaluated."""
        return math.inf if self.candidates is None else self.candidates - len(self.asked)

    def fits(self, items: Items) -> bool:
        """Whether the candidate is within the budget."""
        return self.measure(items) <= self.limit

    def best(self) -> Candidate | None:
        """The candidate of least loss within the budget among those asked for; of equal ones the cheapest."""
        known = [self.state.candidates[text] for text in self.asked]
        fitting = [one for one in known if one.cost <= self.limit]
        return min(fitting, key=lambda one: (one.nll, one.cost, one.program), default=None)

    def near(self, items: Items) -> list[Items]:
        """Every candidate one allowed move away."""
        return neighbours(items, self.bank, self.moves)

    def smaller(self, items: Items) -> list[Items]:
        """The cheaper candidates one move away."""
        cost = self.measure(items)
        return [one for one in neighbours(items, self.bank, self._shrinking()) if self.measure(one) < cost]

    def shrunk(self, items: Items) -> Items:
        """The candidate after removals drawn until it is within the budget, or until one element is left."""
        while not self.fits(items) and (smaller := neighbours(items, self.bank, self._shrinking())):
            items = self.dice.choice(smaller)
        return items

    def _shrinking(self) -> dict[str, Move]:
        return {name: move for name, move in self.moves.items() if move in (drop, part)}


def normal(items: Items) -> str:
    """The normal form of a candidate's program: one text for all ways to write it."""
    return _normal(text_of(items))


@lru_cache(maxsize=1 << 14)
def _normal(text: str) -> str:
    return str(Program.parse(text))
