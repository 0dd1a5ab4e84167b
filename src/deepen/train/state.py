"""The state of a run on disk: what was trained, the moments, the random generators and the step.

    FOLDER/step-00000050/tensors.safetensors     parameter/NAME, exp_avg/NAME, exp_avg_sq/NAME, step/NAME
                                                 random/DEVICE, selection/WHAT
                        /state.json              step, settings, generator of Python
          /log.jsonl

A state appears whole or not at all, and the one before it is removed only then. The batch of a step depends on nothing
but the step, so the step is also the position in the data. Several processes write, each in a file of its own, what
`torch.distributed.checkpoint` gives them; any number of processes reads either.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from deepen.checkpoint.atomic import atomic_folder, leftovers
from deepen.errors import CheckpointError, DeepenError, SaveError, UsageError
from deepen.train.distributed import ALONE, Processes
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


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run is after some updates.

    Attributes:
        step: the updates.
        tensors: by name; those of the run itself, which the next update changes.
        document: the rest, as plain values.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    document: Mapping[str, Any]


def state_of(
    step: int,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    selection: Selection | None = None,
) -> RunState:
    """The state after `step` updates."""
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
    return RunState(step=step, tensors=tensors, document=document)


def write_state(folder: Path, state: RunState, processes: Processes = ALONE, group: Any = None) -> None:
    """Writes a state and removes those before it; several processes do it together.

    Args:
        folder: of the run.
        state: as each process has it.
        processes: who writes.
        group: in which they agree; None: the one that they train in.

    Raises:
        SaveError: it cannot be written; the state before it is whole.
    """
    target = _place(folder, state.step)
    before = processes.by_first(lambda: latest(folder), group)
    if before == state.step:
        return
    try:
        with ExitStack() as opened:
            partial = processes.by_first(lambda: opened.enter_context(atomic_folder(target)), group)
            if processes.count == 1:
                save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, partial / TENSORS)
            else:
                _write_shares(partial, state.tensors, group or processes.control)
            text = json.dumps(state.document)
            processes.by_first(lambda: (partial / STATE).write_text(text, encoding="utf-8"), group)
            # the first one has opened the folder, whose name becomes its own now
            processes.by_first(opened.close, group)
    except (OSError, SafetensorError, DeepenError) as error:
        kept = "no state was saved before" if before is None else f"the state of step {before} is whole"
        raise SaveError(f"cannot save the state of step {state.step}: {error}; {kept}; make room and resume") from error
    if before is not None and processes.first:
        shutil.rmtree(_place(folder, before), ignore_errors=True)


def _write_shares(folder: Path, tensors: Mapping[str, torch.Tensor], group: Any) -> None:
    """Writes what this process has of the tensors; what all have is written once.

    Raises:
        OSError: one of the processes could not.
    """
    # takes seconds to import
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        # safetensors, since torch's own files are pickles
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
        )
    except CheckpointException as error:
        raise OSError("; ".join(str(each) for each, _ in error.failures.values())) from error


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
        tensors = _read(place, parameters)
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


def _read(place: Path, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The tensors of a state; of parameters that are shares, and of their moments, the share of this process."""
    shares = {name: each for name, each in parameters.items() if hasattr(each, "to_local")}
    if not shares and (place / TENSORS).is_file():
        return load_file(place / TENSORS)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(place))
    found: dict[str, torch.Tensor] = {}
    for name, kept in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(kept, TensorStorageMetadata)
        like = shares.get(name.partition("/")[2])
        if like is not None and like.shape == kept.size:
            found[name] = torch.empty_like(like.detach(), dtype=kept.properties.dtype)
        else:
            found[name] = torch.empty(kept.size, dtype=kept.properties.dtype)
    if not found:
        raise FileNotFoundError(f"no tensors in {place}")
    with warnings.catch_warnings():
        # each process reads by itself, on purpose
        warnings.filterwarnings("ignore", "torch.distributed is")
        load(found, storage_reader=reader, no_dist=True)
    return found


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
