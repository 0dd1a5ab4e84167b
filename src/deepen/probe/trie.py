"""The perplexity of many programs of one checkpoint on one text: what programs have in common is run once.

Programs are a trie of tapes (`trie_tapes`) over a bank that is loaded once (`trie_bank`). A batch of windows goes
through the trie depth first. No cache is used. What cannot be shared is run by itself, on the same bank: families whose
layers depend on more than the stream, `kv=first`, copies that do not start equal to their layer.

Memory: beside the model and the logits of one batch, at most `memory` bytes of streams [b, t, d] that are kept where
programs part. A batch that needs more is made smaller; if one window does, what cannot be kept is run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepen.errors import FamilyError, UsageError
from deepen.probe.perplexity import Evaluation, is_causal, summed, window_losses
from deepen.probe.trie_bank import Bank, State
from deepen.probe.trie_tapes import Branch, Move, grow, moves_of, within
from deepen.probe.windows import Window, batches, cut, require_context

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedTokenizerBase
    from deepen.program import Plan, Program

MEMORY = 1 << 30
# Programs of one trie: so that neither its depth nor what is lost on an interruption grows with the number of programs.
TOGETHER = 256


@dataclass(slots=True)
class Visits:
    """Layer visits, each of one window.

    Attributes:
        run: that were run for the programs.
        separate: that separate passes would have run.
        checks: that were run once to find out whether visits can be shared.
        reason: why they could not be shared; empty when they were.
    """

    run: int = 0
    separate: int = 0
    checks: int = 0
    reason: str = ""


def evaluate_many(
    ck: Checkpoint,
    programs: Sequence[Program | str],
    text: str,
    *,
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    memory: int = MEMORY,
    device: str = "cpu",
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Evaluation], Visits]:
    """The evaluations of some programs in their order, as `perplexity` gives them, and the visits they took.

    A program whose logits are not finite has an infinite loss. The seconds of a trie are shared out evenly.

    Args:
        ck: the checkpoint whose bank the programs visit.
        programs: of its default tower.
        text: what to predict.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once, at most.
        memory: bytes of the streams that are kept where programs part.
        device: where the weights go.
        dtype: torch dtype or its name; None keeps that of the files.
        progress: called with the windows done since its last call, and all there are, counted for each program.

    Raises:
        FamilyError: the model has no causal head.
        ProgramError: a program does not fit.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window.

    Example:
        >>> import deepen
        >>> ck = deepen.open("model")                                                         # doctest: +SKIP
        >>> found, visits = deepen.evaluate_many(ck, ["0-5 7-11", "0-6 8-11"], text)          # doctest: +SKIP
    """
    evaluator = Evaluator(ck, device=device, dtype=dtype, memory=memory)
    found = evaluator.evaluate(programs, text, context=context, tokens=tokens, batch=batch, progress=progress)
    return found, evaluator.visits


class Evaluator:
    """A bank that is loaded once and evaluates programs as they come; see `evaluate_many`.

    Attributes:
        bank: the loaded model.
        tokenizer: its tokenizer.
        visits: all visits so far.
    """

    def __init__(self, ck: Checkpoint, *, device: str = "cpu", dtype: Any = None, memory: int = MEMORY) -> None:
        family = ck.family
        if family.default_tower is None:
            raise FamilyError(f"{family.model_type} has no causal head, so perplexity says nothing of its programs")
        self.bank = Bank(ck, device=device, dtype=dtype)
        if not is_causal(self.bank.model):
            name = type(self.bank.model).__name__
            raise FamilyError(f"{name} has no causal head, so perplexity says nothing of its programs")
        self.tokenizer: PreTrainedTokenizerBase = ck.tokenizer()
        self.memory = memory
        self.visits = Visits()

    def evaluate(
        self,
        programs: Sequence[Program | str],
        text: str,
        *,
        context: int = 512,
        tokens: int | None = None,
        batch: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Evaluation]:
        """The evaluations of some programs in their order; see `evaluate_many`."""
        require_context(self.bank.model.config, context)
        if batch < 1:
            raise UsageError(f"a batch has at least 1 window, got {batch}")
        plans = [self.bank.plan(program) for program in programs]
        windows = cut(self.tokenizer, text, context=context, tokens=tokens)
        total = len(plans) * len(windows)
        self.visits.separate += len(windows) * sum(len(plan.visits) for plan in plans)

        def step(count: int) -> None:
            if progress is not None:
                progress(count, total)

        with torch.inference_mode():
            if self.bank.reason is None:
                self.visits.checks = self.bank.examine(self._ids(windows[:1]))
                self.visits.reason = self.bank.reason or ""
            tapes = {at: moves for at, plan in enumerate(plans) if (moves := self._moves(plan)) is not None}
            found: dict[int, Evaluation] = {}
            # programs that begin alike come into one trie
            order = sorted(tapes, key=lambda at: [repr(move) for move in tapes[at]])
            for first in range(0, len(order), TOGETHER):
                together = {at: tapes[at] for at in order[first : first + TOGETHER]}
                found |= self._shared(together, windows, context, batch, step)
            for at, plan in enumerate(plans):
                if at not in found:
                    found[at] = self._alone(plan, windows, context, batch, step)
        return [found[at] for at in range(len(plans))]

    def seconds(self, plan: Plan, ids: torch.Tensor, passes: int = 3) -> float:
        """The median time of a pass without cache over these ids [b, t], after one that does not count."""
        with torch.inference_mode(), self.bank.running(plan) as model:
            times = []
            for _ in range(passes + 1):
                started = time.perf_counter()
                # reading a value waits for a device that works by itself
                model(input_ids=ids, use_cache=False).logits[0, -1, 0].item()
                times.append(time.perf_counter() - started)
        return sorted(times[1:])[passes // 2]

    def _moves(self, plan: Plan) -> tuple[Move, ...] | None:
        return None if self.bank.reason else moves_of(plan)

    def _ids(self, group: Sequence[Window]) -> torch.Tensor:
        return torch.tensor([window.ids for window in group], device=self.bank.model.device)

    def _shared(
        self,
        tapes: dict[int, tuple[Move, ...]],
        windows: Sequence[Window],
        context: int,
        batch: int,
        step: Callable[[int], None],
    ) -> dict[int, Evaluation]:
        root = grow(tapes)
        stream = self.bank.start(self._ids(windows[:1])).stream.nbytes
        while batch > 1 and root.need * batch * stream > self.memory:
            batch //= 2
        root = within(root, self.memory // (batch * stream))
        nll: dict[int, list[float]] = {at: [] for at in tapes}
        started = time.perf_counter()
        for group in batches(windows, batch):
            self._pass(root, group, nll)
            self.visits.run += root.visits * len(group)
            step(len(group) * len(tapes))
        share = (time.perf_counter() - started) / len(tapes)
        return {at: summed(windows, _finite(losses), context, share) for at, losses in nll.items()}

    def _pass(self, root: Branch, group: Sequence[Window], nll: dict[int, list[float]]) -> None:
        """One batch through the trie, depth first; a state on the stack is kept until its last child has it."""
        ids = self._ids(group)
        start = self.bank.start(ids)
        stack = [(root, State(start.stream))]
        while stack:
            branch, state = stack.pop()
            state = self.bank.run(start, state, branch.moves)
            if branch.ends:
                losses = window_losses(self.bank.finish(state.stream, ids), ids, group)
                for at in branch.ends:
                    nll[at] += losses
            stack += [(child, state) for child in reversed(branch.children)]

    def _alone(
        self, plan: Plan, windows: Sequence[Window], context: int, batch: int, step: Callable[[int], None]
    ) -> Evaluation:
        nll: list[float] = []
        started = time.perf_counter()
        with self.bank.running(plan) as model:
            for group in batches(windows, batch):
                ids = self._ids(group)
                nll += window_losses(model(input_ids=ids, use_cache=False).logits, ids, group)
                self.visits.run += len(plan.visits) * len(group)
                step(len(group))
        return summed(windows, _finite(nll), context, time.perf_counter() - started)


def _finite(losses: Sequence[float]) -> list[float]:
    return [loss if math.isfinite(loss) else math.inf for loss in losses]
