"""What healing costs: a step of the training loop against a plain one, and the peak memory of LoRA against PEFT's own.

Speed: SmolLM2-135M in fp32, once run through deepen's loop with its log, once as the plain transformers model in the
shortest loop that does the same: forward with labels, backward, clipping, fused AdamW. The two alternate step by step
on the same batches. Memory: LoRA on every matrix, in processes of their own that load the model, train and report
their peak. By default on one thread and in processor time, which other load on the machine moves least.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_

import deepen
from benchmarks.harness import arguments, peak_bytes, ratio, record
from benchmarks.identity_speed import CLOCKS, models
from deepen.cli.packaged import packaged_model
from deepen.train.loop import train
from deepen.train.losses import CrossEntropy
from deepen.train.recipe import Recipe
from deepen.train.select import add_lora

RANK, LORA_STEPS = 8, 2


def batch(step: int, tokens: int, windows: int) -> torch.Tensor:
    return torch.randint(1000, 40000, (windows, tokens), generator=torch.Generator().manual_seed(step))


def plain_steps(model: Any, recipe: Recipe) -> Callable[[torch.Tensor], float]:
    """One update of the shortest loop, as a function of the batch."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
    )
    model.train()

    def step(ids: torch.Tensor) -> float:
        optimiser.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(parameters, recipe.clip)
        optimiser.step()
        return loss.item()

    return step


def speed(options: Any) -> dict[str, Any]:
    """Seconds of a step, both ways, in turns: the plain step runs where the loop reports its own."""
    ours, plain = models()
    # weights of their own, since both are trained
    plain.load_state_dict({name: each.clone() for name, each in ours.state_dict().items()}, assign=True)
    plain.tie_weights()
    recipe = Recipe(steps=options.rounds + 1, batch=options.batch, warmup=0, floor=1.0, lr=1e-6, eval_every=0,
                    save_every=0)  # fmt: skip
    clock, other = CLOCKS[options.clock], plain_steps(plain, recipe)
    measured: dict[str, list[float]] = {"deepen": [], "plain": []}
    differences = []
    started = clock()

    def report(entry: Any) -> None:
        nonlocal started
        between = clock()
        loss = other(batch(entry.step - 1, options.tokens, options.batch))
        ended = clock()
        differences.append(abs(loss - entry.loss))
        # the first step makes the moments
        if entry.step > 1:
            measured["deepen"].append(between - started)
            measured["plain"].append(ended - between)
            print(f"  step {entry.step - 1}/{options.rounds}: deepen {measured['deepen'][-1]:.3f}  "
                  f"plain {measured['plain'][-1]:.3f}", file=sys.stderr, flush=True)  # fmt: skip
        started = clock()

    with tempfile.TemporaryDirectory() as folder:
        train(ours, lambda step: batch(step, options.tokens, options.batch), recipe, loss=CrossEntropy(),
              folder=Path(folder) / "run", report=report)  # fmt: skip
    if max(differences) > 1e-3:
        raise SystemExit(f"the two loops part by {max(differences)} nats; their speed means nothing")
    found: dict[str, Any] = {f"{name}_step_s": statistics.median(values) for name, values in measured.items()}
    return found | {"step_deepen_to_plain": ratio(measured["deepen"], measured["plain"])}


def lora_peak(who: str, options: Any) -> int:
    """The peak of a process that loads the model, puts LoRA on it and trains a few steps."""
    model = deepen.open(packaged_model()).load(dtype=torch.float32)
    recipe = Recipe(steps=LORA_STEPS, batch=options.batch, eval_every=0)
    if who == "deepen":
        add_lora(model, RANK, "text")
        train(model, lambda step: batch(step, options.tokens, options.batch), recipe, loss=CrossEntropy())
    else:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        step = plain_steps(get_peft_model(model, config), recipe)
        for at in range(LORA_STEPS):
            step(batch(at, options.tokens, options.batch))
    return peak_bytes()


def memory(options: Any) -> dict[str, Any]:
    """The peak of each, in a process of its own."""
    words = ["--tokens", str(options.tokens), "--batch", str(options.batch), "--threads", str(options.threads)]
    peaks = {
        who: int(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.heal_speed", "--lora-peak-of", who, *words],
                capture_output=True, text=True, check=True,
            ).stdout.split()[-1]
        )
        for who in ("deepen", "peft")
    }  # fmt: skip
    return {f"lora_peak_{who}_bytes": peak for who, peak in peaks.items()} | {
        "lora_peak_deepen_to_peft": peaks["deepen"] / peaks["peft"]
    }


def main() -> None:
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a window (default 256)")
    parser.add_argument("--batch", type=int, default=2, help="windows of a batch (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    parser.add_argument("--lora-peak-of", choices=("deepen", "peft"), help="only print one peak, in bytes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.lora_peak_of:
        print(lora_peak(options.lora_peak_of, options))
        return
    results: dict[str, Any] = {"threads": options.threads, "clock": options.clock}
    results |= memory(options) | speed(options)
    for name, value in results.items():
        print(f"{name:28} {value}")
    record("heal_speed", results, options.json)


if __name__ == "__main__":
    main()
