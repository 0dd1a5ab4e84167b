"""The state of a run on disk: what was trained, the moments, the random generators and the step.

    FOLDER/step-00000050/tensors.safetensors     parameter/NAME, exp_avg/NAME, exp_avg_sq/NAME, step/NAME
                                                 random/DEVICE, selection/WHAT
                        /state.json              step, settings, generator of Python
          /log.jsonl

A state appears whole or not at all, and the one before it is removed only then. The batch of a step depends on nothing
but the step, so the step is also the position in the data.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from deepen.checkpoint.atomic import atomic_folder, leftovers
from deepen.errors import CheckpointError, DeepenError, SaveError, UsageError
from deepen.train.recipe import require_same
from deepen.train.selective.selection import Selection

TENSORS, STATE = "tensors.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")


def latest(folder: Path) -> int | None:
    """The step of the last state in a folder, None where there is none."""
    found = [int(match[1]) for path in _inside(folder) if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return max(found, default=None)


def require_start(folder: Path, resume: bool) -> None:
    """Refuses to start over a state, and to resume where there is none.

    Raises:
        UsageError: there is a state, and the run does not resume it.
        CheckpointError: there is none, and the run wants to resume it.
    """
    step = latest(folder)
    if step is not None and not resume:
        raise UsageError(
            f"{folder} holds the state of a run at step {step}; go on with --resume, or remove it to start again"
        )
    if step is None and resume:
        raise CheckpointError(f"{folder}: no state of a run there to resume; leave --resume out to start one")


def save_state(
    folder: Path,
    step: int,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    selection: Selection | None = None,
) -> Path:
    """Writes the state after `step` updates and removes those before it.

    Raises:
        SaveError: it cannot be written; the state before it is whole.
    """
    target = _place(folder, step)
    before = latest(folder)
    if before == step:
        return target
    tensors = {f"parameter/{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        held = optimiser.state.get(parameter, {})
        tensors |= {f"{kind}/{name}": held[kind] for kind in MOMENTS if kind in held}
    if selection is not None:
        tensors |= {f"selection/{name}": each for name, each in selection.state().items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    version, numbers, normal = random.getstate()
    document = {"step": step, "settings": dict(settings), "random": [version, list(numbers), normal]}
    try:
        with atomic_folder(target) as partial:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS)
            (partial / STATE).write_text(json.dumps(document), encoding="utf-8")
    except (OSError, SafetensorError, SaveError) as error:
        kept = "no state was saved before" if before is None else f"the state of step {before} is whole"
        raise SaveError(f"cannot save the state of step {step}: {error}; {kept}; make room and resume") from error
    if before is not None:
        shutil.rmtree(_place(folder, before), ignore_errors=True)
    return target


def load_state(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    selection: Selection | None = None,
) -> int:
    """Brings parameters, moments and generators to the last state of a folder.

    Returns:
        The updates that were done.

    Raises:
        CheckpointError: there is no state, or it is damaged or of other parameters.
        UsageError: it was made with other settings.
    """
    require_start(folder, resume=True)
    step = latest(folder) or 0
    place = _place(folder, step)
    try:
        document = json.loads((place / STATE).read_text(encoding="utf-8"))
        made, (version, numbers, normal) = document["settings"], document["random"]
        require_same(made, json.loads(json.dumps(dict(settings))), str(folder))
        tensors = load_file(place / TENSORS)
    except DeepenError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{place}: the state is damaged: {error}; remove it and start again") from error
    if selection is not None:
        # before the parameters, whose shapes follow from it
        _load_selection(selection, tensors, place)
    stored = {name.removeprefix("parameter/"): each for name, each in tensors.items() if name.startswith("parameter/")}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    if {name: each.shape for name, each in stored.items()} != shapes:
        raise CheckpointError(f"{place}: the state is of other parameters than the run trains; start another run")
    for name, parameter in parameters.items():
        parameter.data.copy_(stored[name])
        held = {kind: tensors[f"{kind}/{name}"] for kind in MOMENTS if f"{kind}/{name}" in tensors}
        if held:
            optimiser.state[parameter] = {kind: each.to(parameter.device) for kind, each in held.items()}
    if selection is not None:
        selection.write()
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    random.setstate((version, tuple(numbers), normal))
    return step


def _load_selection(selection: Selection, tensors: Mapping[str, torch.Tensor], place: Path) -> None:
    """Brings a selection to the state in a folder.

    Raises:
        CheckpointError: it is of another selection.
    """
    held = {name.removeprefix("selection/"): each for name, each in tensors.items() if name.startswith("selection/")}
    try:
        selection.load(held)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{place}: the state is of another selection than the run trains; start another run"
        ) from error


def clean(folder: Path) -> None:
    """Removes what killed writers left in a folder, and states before the last."""
    last = latest(folder)
    for path in _inside(folder):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and int(match[1]) != last:
            shutil.rmtree(path, ignore_errors=True)
        if re.match(r"\.step-\d+\.partial-", path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in leftovers(folder / "log.jsonl"):
        path.unlink(missing_ok=True)


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
