"""Opening a checkpoint: config, index and shard headers are read, no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from deepen.checkpoint.adapter import find_adapter
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.depth_fields import stated_depth
from deepen.checkpoint.expert_record import read_experts
from deepen.checkpoint.factored import read_factors
from deepen.checkpoint.family import Family, family_of
from deepen.checkpoint.layout import NATIVE_TYPE, PROGRAM_VERSION
from deepen.checkpoint.original import original_program
from deepen.checkpoint.skeleton import build_config
from deepen.checkpoint.sources import Source, open_safetensors, parse_json
from deepen.errors import CheckpointError

# The model type of a native stack.
STACK_TYPE = "deepen"
# The range that the parity suite runs on.
TESTED = ((5, 24), (5, 25))


def open_checkpoint(path_or_id: str | Path, *, adapter: str | Path | None = None) -> Checkpoint:
    """Opens a folder, a GGUF file or a hub id.

    Args:
        path_or_id: a folder with config.json and safetensors, a `.gguf` file, or a hub id such as `Qwen/Qwen3-0.6B`
            (the only case that uses the network).
        adapter: the folder of a LoRA adapter in the format of PEFT; one that lies in the checkpoint's folder, or in
            its subfolder `adapter`, needs no mention.

    Raises:
        CheckpointError: missing, truncated, contradictory or unsafe files.
        FamilyError: a family that deepen does not know.
    """
    check_versions()
    path = Path(path_or_id)
    where = str(path_or_id)
    if path.suffix == ".gguf" and path.is_file():
        from deepen.checkpoint.gguf import open_gguf

        config, source = open_gguf(path)
        return replace(_opened(where, None, config, source, gguf=path), adapter=find_adapter(None, adapter))
    if path.is_file():
        raise CheckpointError(f"{where}: expected a folder, a .gguf file or a hub id, got another kind of file")
    if not path.is_dir():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", where) is None:
            raise CheckpointError(f"{where}: no such folder; expected a checkpoint folder, a .gguf file or a hub id")
        path = download(where)
    opened = _opened(where, path, read_config(path), open_safetensors(path))
    return replace(opened, adapter=find_adapter(path, adapter))


def check_versions() -> None:
    """Refuses a transformers that the parity suite was not run on.

    Raises:
        CheckpointError: transformers is older or newer than the tested range.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    low, high = TESTED
    if not low <= version < high:
        raise CheckpointError(
            f"transformers {transformers.__version__} is outside the tested range {low[0]}.{low[1]} to below "
            f"{high[0]}.{high[1]}; layer surgery depends on its internals. Install a version inside the range"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = folder / "config.json"
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint needs config.json beside its weights") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def download(hub_id: str) -> Path:
    """The local copy of a hub repository: safetensors, JSON and tokenizer files only.

    Raises:
        CheckpointError: the repository cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many types; all mean the same here
        raise CheckpointError(
            f"{hub_id}: no such folder, and the hub repository of that name cannot be fetched: {error}"
        ) from error


def _opened(
    where: str, folder: Path | None, raw: Mapping[str, Any], source: Source, gguf: Path | None = None
) -> Checkpoint:
    if raw.get("model_type") == NATIVE_TYPE:
        return _native(where, folder, raw, source)
    if raw.get("model_type") == STACK_TYPE:
        from deepen.checkpoint.stack_checkpoint import open_stack

        return open_stack(where, folder, raw, source)
    family = family_of(raw, where)
    banks = {name: tuple(range(depth)) for name, depth in depths(family, raw, where).items()}
    program = original_program(raw, family, banks)
    return Checkpoint(where, folder, family, dict(raw), source, banks, program, gguf)


def depths(family: Family, raw: Mapping[str, Any], where: str) -> dict[str, int]:
    """The depth of each tower as config.json states it."""
    config = build_config(raw, where)
    return {tower.name: stated_depth(config, raw, tower, where)[1] for tower in family.towers}


def _native(where: str, folder: Path | None, raw: Mapping[str, Any], source: Source) -> Checkpoint:
    for name, kind in (("program", str), ("program_version", int), ("bank", dict), ("base", dict)):
        if not isinstance(raw.get(name), kind):
            raise CheckpointError(f"{where}: config.json of a deepen checkpoint needs {name!r} ({kind.__name__})")
    if raw["program_version"] > PROGRAM_VERSION:
        raise CheckpointError(
            f"{where}: written with program version {raw['program_version']}, this deepen reads up to "
            f"{PROGRAM_VERSION}; install a newer deepen"
        )
    base = raw["base"]
    family = family_of(base, where)
    known = depths(family, base, where)
    banks = {}
    for name, depth in known.items():
        bank = raw["bank"].get(name)
        if not isinstance(bank, list) or not all(isinstance(i, int) and 0 <= i < depth for i in bank):
            raise CheckpointError(
                f"{where}: bank of the {name} tower must list layers 0-{depth - 1} of the base config, got "
                f"{json.dumps(bank)}"
            )
        banks[name] = tuple(bank)
    program = original_program(base, family, banks)
    widths, factors = _widths(raw, banks, where), read_factors(raw, banks, where)
    opened = Checkpoint(
        where, folder, family, dict(base), source, banks, program,
        widths=widths, factors=factors, experts=read_experts(raw, banks, where),
    )  # fmt: skip
    applied = opened.apply(raw["program"])
    owns = any(applied.plan(name).owned for name in banks)
    return replace(applied, owned=applied.program) if owns else applied


def _widths(raw: Mapping[str, Any], banks: Mapping[str, tuple[int, ...]], where: str) -> dict[str, dict[int, int]]:
    """The widths of layers that are not as wide as the base config says."""
    given = raw.get("widths", {})
    found: dict[str, dict[int, int]] = {}
    try:
        for name, widths in given.items():
            found[name] = {range(len(banks[name]))[int(layer)]: int(width) for layer, width in widths.items()}
            if any(width < 1 for width in found[name].values()) or len(found[name]) != len(widths):
                raise ValueError
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CheckpointError(
            f"{where}: widths must give layers of a tower ({', '.join(banks)}) a feed-forward width, such as "
            f'{{"text": {{"3": 4096}}}}, got {json.dumps(given)}'
        ) from None
    return found
