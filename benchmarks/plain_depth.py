"""Depth with and without shortcuts: a ResNet and the plain net of the same parameters, at 20 and 56 layers, on images.

Each pair of runs shares its seed: initial values by the same rule and the same batches in the same order. Reported are
the training loss over the last steps, the accuracy on held-out images, and the size of the gradient at the first step;
differences are paired over seeds with Student's interval. The question is that of He et al., arXiv:1512.03385, at a
small width and for a short time.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import record
from deepen.compare.statistics import paired
from deepen.stack.shapes.resnet import ResNet, ResNetConfig
from deepen.tasks.read import read_task
from deepen.tasks.task import Data

LAST = 20


def model_of(layers: int, residual: bool, width: int, data: Data, seed: int) -> nn.Module:
    """The CIFAR form: 6 n + 2 layers in three stages."""
    blocks = (layers - 2) // 6
    config = ResNetConfig(
        blocks=(blocks,) * 3, width=width, shortcut="pad", residual=residual,
        channels=data.stack["image"][0], classes=data.stack["classes"],
    )  # fmt: skip
    return ResNet(config, seed=seed)


def run(model: nn.Module, data: Data, steps: int, batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Trains with momentum and a cosine, as the paper does but for the schedule."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    losses, first = [], 0.0
    for step in range(steps):
        rows = data.batch(step, batch, seed)
        loss = F.cross_entropy(model(rows.inputs), rows.targets)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        first = norm if step == 0 else first
        optimiser.step()
        schedule.step()
        losses.append(float(loss))
    model.eval()
    with torch.no_grad():
        right = [
            (model(rows.inputs).argmax(-1) == rows.targets).float() for rows in data.held_out(data.splits[-1], 256)
        ]
    return {"loss": statistics.fmean(losses[-LAST:]), "accuracy": float(torch.cat(right).mean()), "gradient": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 56])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=4, help="of the first stage (default 4; the paper has 16)")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--source", default="fashion-mnist", help="fashion-mnist (default) or digits")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    options = parser.parse_args()
    data = read_task({"name": "images", "source": options.source, "examples": 1000}).data()
    found: dict[str, Any] = {}
    for layers in options.layers:
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for seed in range(options.seeds):
            for residual in (True, False):
                model = model_of(layers, residual, options.width, data, seed)
                made = run(model, data, options.steps, options.batch, options.rate, seed)
                runs[residual].append(made)
                print(f"{layers} layers, {'residual' if residual else 'plain'}, seed {seed}: {made}", flush=True)
        found[str(layers)] = {
            "residual": runs[True],
            "plain": runs[False],
            "residual_less_plain": {
                name: paired(*([each[name] for each in runs[kind]] for kind in (True, False))).to_json()
                for name in ("loss", "accuracy")
            },
        }
        for name, figures in found[str(layers)]["residual_less_plain"].items():
            print(f"{layers} layers, residual less plain, {name}: {figures}", flush=True)
    record("plain_depth", found, options.json)


if __name__ == "__main__":
    main()
