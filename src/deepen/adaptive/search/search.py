"""Search: the best program of a checkpoint under a budget, and what it is worth on text that decided nothing.

text -- first half  --> searched on: every candidate's loss
     -- second half --> held out: read once, at the end, for the best program and the whole model
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from deepen.adaptive.search.budget import limit, meter, parse_budget
from deepen.adaptive.search.moves import DEFAULT, Bank, chosen, text_of
from deepen.adaptive.search.problem import Finished, Problem
from deepen.adaptive.search.state import Candidate, State, fingerprint, read_state, text_digest
from deepen.errors import DataError, SaveError, UsageError, nearest
from deepen.probe.interval import Difference, paired_difference
from deepen.probe.perplexity import Evaluation
from deepen.probe.scarce import lowering
from deepen.program.normal import normalise
from deepen.registry import Method, methods

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

MEMORY = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Part:
    """The best program and the whole model on one part of the text, and the difference between them."""

    best: Evaluation
    whole: Evaluation
    difference: Difference

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return {
            "best": self.best.to_json(),
            "whole": self.whole.to_json(),
            "difference": self.difference.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        program: the best program within the budget.
        whole: the model's own program.
        method: what it was found by.
        budget: what was asked for, such as `layers=0.75`.
        cost: of the best program, in the unit of the budget.
        limit: what it might cost.
        whole_cost: what the model's own program costs.
        searched: figures on the text that was searched on, which flatter the best program.
        held_out: figures on text that decided nothing.
        frontier: the programs of which none costs less at a smaller loss, by cost.
        candidates: programs evaluated.
        visits: layer visits that were run for the candidates, and that separate passes would have run; a search that
            goes on counts anew.
        ended: whether the method had no more to ask, or candidates or time were used up.
    """

    program: str
    whole: str
    method: str
    budget: str
    cost: float
    limit: float
    whole_cost: float
    searched: Part
    held_out: Part
    frontier: tuple[Candidate, ...]
    candidates: int
    visits: tuple[int, int]
    ended: bool

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        names = ("program", "whole", "method", "budget", "cost", "limit", "whole_cost", "candidates", "ended")
        points = [{"program": one.program, "cost": one.cost, "nll": one.nll} for one in self.frontier]
        return {name: getattr(self, name) for name in names} | {
            "visits": {"run": self.visits[0], "separate": self.visits[1]},
            "searched": self.searched.to_json(),
            "held_out": self.held_out.to_json(),
            "frontier": points,
        }


def search(
    ck: Checkpoint,
    text: str,
    *,
    budget: str = "0.75",
    method: str = "beam",
    moves: Sequence[str] = DEFAULT,
    candidates: int | None = 200,
    minutes: float | None = None,
    seed: int = 0,
    context: int = 512,
    tokens: int | None = 2048,
    held_out_tokens: int | None = 8192,
    batch: int = 1,
    memory: int = MEMORY,
    device: str = "cpu",
    dtype: Any = None,
    path: str | Path | None = None,
    resume: bool = False,
    report: Callable[[Problem], None] = lambda problem: None,
) -> Found:
    """The best program within a budget that a method finds, with its figures on searched and held-out text.

    Args:
        ck: the checkpoint; its program is the whole that is compared with.
        text: its first half is searched on, its second half held out.
        budget: such as `0.75`, `flops=0.75`; see `parse_budget`.
        method: a method of the family `search`.
        moves: names of `MOVES`; contiguous and random search use those that they need.
        candidates: programs to evaluate; None for as many as the method wants.
        minutes: time for the evaluations; None for as long as it takes.
        seed: of all draws.
        context: tokens of a window.
        tokens: tokens to search on; None for the whole half.
        held_out_tokens: tokens of the held-out half to read at the end.
        batch: windows that are read at once.
        memory: bytes of the streams that are kept where programs part.
        device: where the weights go.
        dtype: torch dtype or its name; None keeps that of the files.
        path: the file that keeps the candidates; None keeps none.
        resume: go on with the search that the file holds.
        report: called after each round of evaluations.

    Raises:
        UsageError: an unknown method, move or kind of budget; a budget that cannot be met; a file of another search.
        DataError: less text than two windows in each half.
        FamilyError: the model has no causal head.
        SaveError: the file exists and is not to be continued.

    Example:
        >>> import deepen
        >>> found = deepen.search(deepen.open("model"), text, budget="0.75")          # doctest: +SKIP
        >>> found.program, found.held_out.difference                                  # doctest: +SKIP
    """
    asked, allowed, by = parse_budget(budget), chosen(moves), _method(method)
    if candidates is not None and candidates < 1:
        raise UsageError(f"a search evaluates at least 1 candidate, got {candidates}")
    if minutes is not None and not minutes > 0:
        raise UsageError(f"a search takes more than 0 minutes, got {minutes:g}")
    ck.require_executable()
    tower = ck.family.tower("")
    searched, held_out = halves(text)
    _require_windows(ck, {"searched": (searched, tokens), "held-out": (held_out, held_out_tokens)}, context)
    setup = {
        "model": fingerprint(ck),
        "budget": str(asked),
        "method": method,
        "moves": list(allowed),
        "seed": seed,
        "context": context,
        "tokens": tokens,
        "held_out_tokens": held_out_tokens,
        "batch": batch,
        "text": text_digest(text),
        "dtype": str(dtype),
        "device": device.partition(":")[0],
    }
    state = _state(None if path is None else Path(path), setup, resume)
    whole = normalise(ck.program.tree(tower.name if len(ck.family.towers) > 1 else ""), ck.depth[tower.name]).items
    bank = Bank(ck.depth[tower.name], "" if tower.parts.kind in ("whole", "single") else tower.parts.letters)

    from deepen.probe.trie import Evaluator

    evaluator = Evaluator(ck, device=device, dtype=dtype, memory=memory)
    options: dict[str, Any] = {"context": context, "batch": batch}
    measure = meter(ck, asked.kind, context, lambda program: _seconds(evaluator, program, context))
    problem = Problem(
        whole=whole,
        bank=bank,
        moves=allowed,
        measure=measure,
        limit=limit(asked, measure, whole, bank, "part" in allowed),
        dice=Random(seed),
        state=state,
        evaluate=lambda texts: [found.nll for found in evaluator.evaluate(texts, searched, tokens=tokens, **options)],
        distances=lambda: _distances(ck, searched, tokens=tokens, device=device, dtype=dtype, **options),
        candidates=candidates,
        deadline=math.inf if minutes is None else time.monotonic() + 60 * minutes,
        report=report,
        legal=evaluator.bank.plan,
    )
    # a path that cannot be written is found out before the first evaluation
    state.write()
    with lowering(batch=batch, context=context, memory=memory // 10**6):
        ended = _run(by, problem)
    visits = evaluator.visits.run, evaluator.visits.separate
    best = problem.best()
    if best is None:
        raise UsageError(
            f"none of the {len(problem.asked)} programs evaluated is within {asked}; raise --candidates or --minutes"
        )
    parts = [
        _part(evaluator.evaluate([best.program, text_of(whole)], half, tokens=count, **options))
        for half, count in ((searched, tokens), (held_out, held_out_tokens))
    ]
    found = Found(
        program=best.program,
        whole=text_of(whole),
        method=method,
        budget=str(asked),
        cost=best.cost,
        limit=problem.limit,
        whole_cost=measure(whole),
        searched=parts[0],
        held_out=parts[1],
        frontier=tuple(frontier([state.candidates[text] for text in problem.asked])),
        candidates=len(problem.asked),
        visits=visits,
        ended=ended,
    )
    state.result = found.to_json()
    state.write()
    return found


def halves(text: str) -> tuple[str, str]:
    """The text in two parts of about the same length, cut at a blank."""
    middle = len(text) // 2
    at = next((place for place in range(middle, len(text)) if text[place].isspace()), middle)
    return text[:at], text[at:]


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which none is cheaper at a loss that is as small, by cost."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.cost, one.nll, one.program)):
        if math.isfinite(one.nll) and (not found or one.nll < found[-1].nll):
            found.append(one)
    return found


def _method(name: str) -> Method:
    known = {found.name: found for found in methods("search")}
    if name not in known:
        raise UsageError(f"no search method {name!r}{nearest(name, known)}; known are {', '.join(known)}")
    return known[name]


def _state(path: Path | None, setup: Mapping[str, Any], resume: bool) -> State:
    if path is None:
        return State(setup)
    if path.exists():
        if not resume:
            raise SaveError(
                f"{path} exists already and is left as it is; --resume goes on with it, --out names another"
            )
        return read_state(path, setup)
    if resume:
        raise DataError(f"{path} does not exist, so there is no search to go on with; leave out --resume")
    return State(setup, path)


def _require_windows(ck: Checkpoint, parts: Mapping[str, tuple[str, int | None]], context: int) -> None:
    """Refuses parts of the text with fewer than two windows, of which there is no interval."""
    from deepen.probe.windows import cut

    tokenizer = ck.tokenizer()
    for name, (text, tokens) in parts.items():
        needed = 2 * context
        if tokens is not None and tokens < needed:
            raise UsageError(f"{tokens} {name} tokens are fewer than two windows of {context}; ask for more")
        windows = cut(tokenizer, text, context=context, tokens=None if tokens is None else needed)
        if len(windows) < 2:
            raise DataError(
                f"the {name} half of the text has fewer than two windows of {context} tokens; give more text or lower "
                "--context"
            )


def _run(method: Method, problem: Problem) -> bool:
    try:
        method.implementation(problem)
    except Finished:
        return False
    return True


def _part(found: Sequence[Evaluation]) -> Part:
    best, whole = found
    if not (math.isfinite(best.nll) and math.isfinite(whole.nll)):
        raise DataError("the model's logits are not finite on this text; compute in --dtype float32")
    return Part(best=best, whole=whole, difference=paired_difference(best, whole))


def _seconds(evaluator: Any, program: str, context: int) -> float:
    import torch

    bank = evaluator.bank
    ids = torch.zeros(1, context, dtype=torch.long, device=bank.model.device)
    return evaluator.seconds(bank.plan(program), ids)


def _distances(ck: Checkpoint, text: str, **options: Any) -> Any:
    from deepen.probe.scores.angular import block_distances

    return block_distances(ck, text, **options)
