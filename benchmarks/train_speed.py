"""What the loop of `deepen train` costs: a step against a bare one, the share of the data, the stall of a save.

Speed: the stack of `stack_speed`, once trained by deepen's loop with its log and callbacks, once by the shortest loop
that does the same on the same batches: forward, cross-entropy, backward, clipping, fused AdamW. The two alternate step
by step. Data: the seconds that the loop waits for batches of its text, over those of its steps. Saves: a state of 500
MB; what a save adds to a step, at once and in the background, each against steps without one, in wall clock.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import arguments, ratio, record
from benchmarks.identity_speed import CLOCKS
from benchmarks.stack_speed import HEADS, HIDDEN, LAYERS, WIDTH
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack
from deepen.tasks.batch import Batch
from deepen.tasks.read import read_task
from deepen.tasks.task import Data
from deepen.train.depth import Depth
from deepen.train.learner import Learner, TaskLoss
from deepen.train.loop import train
from deepen.train.muon import optimiser_of
from deepen.train.saver import Saver
from deepen.train.schedule import Scheduled
from deepen.train.state import state_of


def bare_steps(stack: Stack, recipe: Scheduled) -> Callable[[Batch], float]:
    """One update of the shortest loop, as a function of the batch."""
    decayed = [each for each in stack.parameters() if each.ndim > 1]
    plain = [each for each in stack.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)
    stack.train()

    def step(batch: Batch) -> float:
        optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(stack(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        clip_grad_norm_(stack.parameters(), recipe.clip)
        optimiser.step()
        return loss.item()

    return step


def speed(options: Any) -> dict[str, Any]:
    """Tokens a second of the loop over those of the bare one, and the share of a step that batches take."""
    clock = CLOCKS[options.clock]
    data: Data = read_task({"name": "text", "source": "shakespeare", "context": options.tokens}).data()
    config = StackConfig.model_validate(
        {**data.stack, "layers": LAYERS, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN, "tied": False}
    )
    learner = Learner(Stack(config, seed=0))
    recipe = Scheduled(steps=options.rounds + 1, batch=options.batch, lr=1e-4, warmup=0, schedule="constant",
                       eval_every=0, save_every=0)  # fmt: skip
    other = bare_steps(deepcopy(learner.stack), recipe)
    measured: dict[str, list[float]] = {"deepen": [], "bare": []}
    reading, differences = list[float](), list[float]()

    def batches(step: int) -> Batch:
        began = clock()
        found = data.batch(step, options.batch, 0)
        reading.append(clock() - began)
        return found

    started = clock()

    def report(entry: Any) -> None:
        nonlocal started
        between = clock()
        batch = data.batch(entry.step - 1, options.batch, 0)
        began = clock()
        loss = other(batch)
        ended = clock()
        differences.append(abs(loss - entry.loss))
        # the first step makes the moments
        if entry.step > 1:
            measured["deepen"].append(between - started)
            # the bare loop reads its batches too
            measured["bare"].append(ended - began + reading[-1])
            print(f"  step {entry.step - 1}/{options.rounds}: deepen {measured['deepen'][-1]:.3f}  "
                  f"bare {measured['bare'][-1]:.3f}", file=sys.stderr, flush=True)  # fmt: skip
        started = clock()

    with tempfile.TemporaryDirectory() as folder:
        train(learner, batches, recipe, loss=TaskLoss(), folder=Path(folder) / "run", report=report,
              optimise=optimiser_of, callbacks=[Depth(learner, steps=recipe.steps, seed=0)])  # fmt: skip
    if max(differences) > 1e-3:
        raise SystemExit(f"the two loops part by {max(differences)} nats; their speed means nothing")
    shares = [wait / step for wait, step in zip(reading[1:], measured["deepen"], strict=True)]
    return {
        "step_s": statistics.median(measured["deepen"]),
        "tokens_per_second_deepen_to_bare": ratio(measured["bare"], measured["deepen"]),
        "data_share_of_step": statistics.median(shares),
    }


class Wide(nn.Module):
    """Matrices of so many MB in all, with moments of three times that in a state; a step that takes a while."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(round(megabytes / 4.194304)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.maps:
            x = x + each(F.rms_norm(x, (1024,)))
        return x.square().mean()


def saves(options: Any) -> dict[str, Any]:
    """Seconds that a save of a state adds to a step, in the background over at once."""
    model = Wide(options.megabytes / 3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    parameters = dict(model.named_parameters())
    rows = torch.randn(options.inputs, 1024)

    def step(saver: Saver | None, number: int) -> float:
        """Seconds from an update to the end of the next, with a save between where there is a saver."""
        began = time.perf_counter()
        if saver is not None:
            saver.save(state_of(number, parameters, optimiser, {}))
        optimiser.zero_grad(set_to_none=True)
        model(rows).backward()
        if saver is not None:
            saver.settle()
        optimiser.step()
        return time.perf_counter() - began

    stalls: dict[str, list[float]] = {"blocking": [], "background": []}
    step(None, 0)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        savers = {}
        for name in stalls:
            (Path(place) / name).mkdir()
            savers[name] = Saver(Path(place) / name, background=name == "background")
        for number in range(options.saves + 1):
            for name, saver in savers.items():
                without = statistics.median(step(None, 0) for _ in range(3))
                stall = step(saver, number + 1) - without
                saver.finish()
                # the first one finds its memory
                if number:
                    stalls[name].append(stall)
                    print(f"  save {number}/{options.saves}: {name} {stall:.3f} (step {without:.3f})", file=sys.stderr)
    size = sum(each.nbytes for each in state_of(0, parameters, optimiser, {}).tensors.values())
    return {
        "state_bytes": size,
        **{f"stall_{name}_s": statistics.median(found) for name, found in stalls.items()},
        "stall_background_to_blocking": ratio(stalls["background"], stalls["blocking"]),
    }


def main() -> None:
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--batch", type=int, default=16, help="windows of a batch (default 16)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a window (default 256)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    parser.add_argument("--saves", type=int, default=6, help="saves of each kind (default 6)")
    parser.add_argument("--megabytes", type=float, default=500, help="of the state that is saved (default 500)")
    parser.add_argument("--inputs", type=int, default=32, help="rows of a step between saves (default 32)")
    parser.add_argument("--folder", type=Path, help="where states are written (default: that of temporary files)")
    parser.add_argument("--only", choices=("speed", "saves"), help="leave the other part out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"threads": options.threads, "clock": options.clock}
    for part in (speed, saves):
        if options.only in (None, part.__name__):
            results |= part(options)
    for name, value in results.items():
        print(f"{name:44} {value}")
    record("train_speed", results, options.json)


if __name__ == "__main__":
    main()
