"""The one training loop of the product.

    for each step: batch -> pieces -> loss, gradients -> clip -> finite? -> update -> [held-out loss] -> log -> [state]

What is trained is what requires a gradient when the loop begins; `deepen.train.select` chooses that, a `Selection`
may move it between steps, and a `Callback` may put other parameters in the place of those that are there. The batch
of a step is a function of the step, the state holds everything else that moves, and so a run that was killed ends, on
the CPU, with the same bits as one that was not.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from deepen.errors import SaveError, UsageError
from deepen.train.callbacks import Callback
from deepen.train.curriculum import Turns
from deepen.train.distributed import ALONE, Processes, whole
from deepen.train.log import Entry, Log
from deepen.train.losses import Loss
from deepen.train.optim import adamw, trained
from deepen.train.recipe import Recipe
from deepen.train.saver import Saver
from deepen.train.selective.selection import Selection
from deepen.train.state import clean, latest, load_state, require_start, state_of
from deepen.train.stops import NotFinite, Stopped, first_gradient, first_output, signals

Report = Callable[[Entry], None]
Optimise = Callable[[nn.Module, Recipe], torch.optim.Optimizer]


class Rows(Protocol):
    """A batch: a tensor, or something else that can be moved and cut into pieces."""

    def __len__(self) -> int: ...
    def numel(self) -> int: ...
    def to(self, device: torch.device, /) -> Any: ...
    def chunk(self, pieces: int, /) -> Sequence[Any]: ...


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run did.

    Attributes:
        steps: updates in all, those before a resume included.
        parameters: numbers that were trained.
        losses: of the steps of this process.
        seconds: of this process.
    """

    steps: int
    parameters: int
    losses: tuple[float, ...]
    seconds: float


def train(
    model: nn.Module,
    batches: Callable[[int], Rows],
    recipe: Recipe,
    *,
    loss: Loss | Callable[[Any, Any], torch.Tensor],
    folder: Path | None = None,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    evaluate: Callable[[], float | Mapping[str, float]] | None = None,
    report: Report | None = None,
    selection: Selection | None = None,
    turns: Turns | None = None,
    optimise: Optimise = adamw,
    callbacks: Sequence[Callback] = (),
    processes: Processes = ALONE,
    background: bool = False,
) -> Trained:
    """Trains a module in place.

    Args:
        model: the module; its parameters that require a gradient are trained. It is left in eval mode.
        batches: the batch of a step, [b, t] or `Rows`, the same at every call.
        recipe: how.
        loss: what is lowered.
        folder: gets the log and the states; None writes nothing.
        resume: go on from the last state in the folder.
        settings: what else a resumed run must share, such as a digest of the data; plain values.
        evaluate: the held-out loss of the model in eval mode, in nats a token; or that under the name `loss`, and
            more beside it.
        report: called after every step.
        selection: what was selected of the model, where blocks of matrices are trained; it is not released.
        turns: sets how often the run-time loops of the model run in each step; elsewhere they run their maximum.
        optimise: makes the optimiser; a group with a `factor` gets so many times the rate.
        callbacks: what else happens in each step.
        processes: who train it together; each calls this with the same arguments, and the first one alone writes and
            reports. The model may hold shares of its parameters afterwards.
        background: write states while training goes on.

    Raises:
        UsageError: nothing to train, states in the folder without `resume`, or a resume with other settings.
        CheckpointError: `resume` without a whole state.
        NotFinite: a loss or gradient that is NaN or infinite, with the step and the place.
        Stopped: SIGTERM came; the state was saved first. After SIGINT it is KeyboardInterrupt.
        SaveError: the folder cannot be written; the last state is whole.
    """
    run = _Run(model, batches, recipe, loss, folder, {**recipe.fixed(), **(settings or {})}, selection, turns,
               optimise, callbacks, processes, background)  # fmt: skip
    with seeded(recipe.seed), _modes(model, recipe), signals() as came:
        done = run.begin(resume)
        started = time.perf_counter()
        losses = []
        try:
            for step in range(done, recipe.steps):
                entry = run.step(step)
                if evaluate is not None and recipe.eval_every and (step + 1) % recipe.eval_every == 0:
                    entry = run.looked(entry, evaluate)
                losses.append(entry.loss)
                if run.log is not None:
                    run.log.write(entry)
                if report is not None and processes.first:
                    report(entry)
                last = step + 1 == recipe.steps
                # all of several processes stop after the same step
                number = processes.largest(came[0] if came else 0)
                if last or number or (recipe.save_every and (step + 1) % recipe.save_every == 0):
                    run.save(step + 1)
                if number:
                    run.stop(number, step + 1)
        finally:
            run.end()
    count = sum(parameter.numel() for parameter in run.parameters.values())
    return Trained(steps=recipe.steps, parameters=count, losses=tuple(losses), seconds=time.perf_counter() - started)


class _Run:
    """The things that a step moves."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Rows],
        recipe: Recipe,
        loss: Loss | Callable[[Any, Any], torch.Tensor],
        folder: Path | None,
        settings: Mapping[str, Any],
        selection: Selection | None,
        turns: Turns | None,
        optimise: Optimise,
        callbacks: Sequence[Callback],
        processes: Processes,
        background: bool,
    ) -> None:
        self.model, self.batches, self.recipe, self.loss = model, batches, recipe, loss
        self.folder, self.settings, self.selection = folder, settings, selection
        self.turns, self.optimise, self.callbacks = turns, optimise, callbacks
        self.processes = processes
        self.saver = None if folder is None else Saver(folder, processes, background=background)
        self.log: Log | None = None
        trained(model)

    def _take(self) -> None:
        """Takes the parameters that the model has now, with a new optimiser."""
        # what gives the loss; of several processes it exchanges gradients
        self.called = self.processes.spread(self.model)
        self.parameters = trained(self.model)
        self.optimiser = self.optimise(self.model, self.recipe)
        self.device = next(iter(self.parameters.values())).device

    def begin(self, resume: bool) -> int:
        """Makes the folder or reads its last state; returns the updates that were done."""
        if self.folder is None:
            if resume:
                raise UsageError("only a run with a folder can be resumed")
            self._take()
            return 0
        require_start(self.folder, resume)
        if resume:
            for callback in self.callbacks:
                callback.begin(latest(self.folder) or 0)
        self._take()
        done = load_state(self.folder, self.parameters, self.optimiser, self.settings, self.selection) if resume else 0
        self.processes.by_first(lambda: self._open(done))
        return done

    def _open(self, done: int) -> None:
        """Makes the folder, without what killed runs left in it, and its log."""
        assert self.folder is not None
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise SaveError(f"cannot make {self.folder}: {error.strerror}; choose another place") from error
        clean(self.folder)
        self.log = Log(self.folder / "log.jsonl", done)

    def end(self) -> None:
        """Closes the log, once the last state is written; a folder in which nothing happened is removed."""
        self.rest()
        try:
            if self.saver is not None:
                self.saver.finish()
        finally:
            self._close()

    def _close(self) -> None:
        if self.log is None:
            return
        self.log.close()
        if self.log.path.stat().st_size == 0 and latest(self.log.path.parent) is None:
            self.log.path.unlink()
            with suppress(OSError):
                self.log.path.parent.rmdir()

    def rest(self) -> None:
        """Lets run-time loops run their maximum, outside of steps."""
        if self.turns is not None:
            self.turns.rest()

    def step(self, step: int) -> Entry:
        """One update."""
        started = time.perf_counter()
        ids = self.batches(step)
        # pieces of different sizes would not have equal shares in the mean
        if len(ids) != self.recipe.batch:
            raise UsageError(
                f"the batch of step {step + 1} has {len(ids)} windows; the recipe says {self.recipe.batch}"
            )
        if self.selection is not None:
            self._settle()
            self.selection.before(step)
        for callback in self.callbacks:
            if (born := callback.before(step)) is not None:
                self._grow(born)
        drawn = None if self.turns is None else self.turns.set(step)
        pieces = [piece.to(self.device) for piece in self.processes.share(ids, self.recipe.accumulate)]
        self.optimiser.zero_grad(set_to_none=True)
        losses = []
        for place, piece in enumerate(pieces, 1):
            with nullcontext() if place == len(pieces) else self.processes.unsynchronised(self.called):
                value = self._loss(piece) / len(pieces)
                value.backward()
            losses.append(value.detach())
        norm = whole(clip_grad_norm_(self.parameters.values(), self.recipe.clip))
        total = self.processes.mean(torch.stack(losses).sum().float())
        # one wait for the device a step
        loss, size = torch.stack([total, norm.float()]).tolist()
        if not (math.isfinite(loss) and math.isfinite(size)):
            raise self._not_finite(step, loss, size, pieces)
        for callback in self.callbacks:
            callback.gradients(step, self.parameters)
        rate = self.recipe.lr_at(step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        self._settle()
        self.optimiser.step()
        if self.selection is not None:
            self.selection.after(step, self.optimiser)
        speed = ids.numel() / max(time.perf_counter() - started, 1e-9)
        return Entry(step=step + 1, loss=loss, lr=rate, grad_norm=size, tokens_per_second=speed, turns=drawn)

    def _settle(self) -> None:
        """Waits until the weights may change."""
        if self.saver is not None:
            self.saver.settle()

    def _grow(self, born: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Goes on with other parameters, each with the state of the one it began as, where it has one."""
        held = self.optimiser.state
        self._take()
        for parameter, origin in born.items():
            if origin in held:
                self.optimiser.state[parameter] = {name: each.clone() for name, each in held[origin].items()}

    def looked(self, entry: Entry, evaluate: Callable[[], float | Mapping[str, float]]) -> Entry:
        """The entry of a step, with what is found on the held-out data."""
        self.model.eval()
        self.rest()
        found = evaluate()
        self.model.train()
        measures = dict(found) if isinstance(found, Mapping) else {"loss": found}
        held_out = measures.pop("loss")
        for callback in self.callbacks:
            measures |= callback.measures()
        return replace(entry, held_out=held_out, measures=measures or None)

    def _loss(self, piece: Any) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.recipe.autocast):
            return self.loss(self.called, piece)

    def _not_finite(self, step: int, loss: float, norm: float, pieces: Sequence[Any]) -> NotFinite:
        if self.processes.count > 1:
            # only the process whose rows they are could say where, and looking takes all of them
            what = f"the loss is {loss}, the norm of the gradient {norm}"
        elif math.isfinite(loss):
            place = first_gradient(self.model)
            what = f"the gradient is not finite, first at {place}" if place else "the norm of the gradient overflows"
        else:
            outputs = (first_output(self.model, lambda piece=piece: self._loss(piece)) for piece in pieces)
            place = next((name for name in outputs if name), None)
            what = f"the loss is {loss}" + (f", first at the output of {place}" if place else "")
        kept = None if self.folder is None else latest(self.folder)
        saved = "" if kept is None else f" The state of step {kept} is in {self.folder}."
        return NotFinite(f"step {step + 1}: {what}; the weights were not updated. {self.recipe.advice}.{saved}")

    def save(self, step: int) -> None:
        if self.saver is not None:
            self.saver.save(state_of(step, self.parameters, self.optimiser, self.settings, self.selection))

    def stop(self, number: int, step: int) -> None:
        """Ends the run after a signal.

        Raises:
            Stopped: after SIGTERM.
            KeyboardInterrupt: after SIGINT.
        """
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        where = "nothing was saved" if self.folder is None else f"its state is in {self.folder}; go on with --resume"
        raise Stopped(f"stopped by SIGTERM after step {step} of {self.recipe.steps}; {where}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch and Python, and gives them back as they were."""
    before = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


@contextmanager
def _modes(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Training mode, with gradient checkpointing where the recipe asks for it; all of it is taken back."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if recipe.gradient_checkpointing:
        if enable is None:
            raise UsageError(f"{type(model).__name__} has no gradient checkpointing; leave it out")
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        if recipe.gradient_checkpointing:
            model.activation_checkpointing_disable()  # pyright: ignore[reportCallIssue]
