"""LoRA adapters in the format of PEFT, brought along when the layers they act on move.

A saved checkpoint keeps its adapter in the folder `adapter` inside its own, since PEFT would take an adapter beside the
weights for one of the model that its config names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepen.checkpoint.atomic import atomic_file
from deepen.checkpoint.disk import output_tensors
from deepen.checkpoint.layer_names import LayerNames, layer_names
from deepen.errors import CheckpointError, SaveError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.layout import Layout, NewLayer

CONFIG, WEIGHTS, FOLDER = "adapter_config.json", "adapter_model.safetensors", "adapter"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """An adapter: its config and its tensors by name, with PEFT's prefix."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def find_adapter(folder: Path | None, given: str | Path | None) -> Path | None:
    """The folder of the adapter that belongs to a checkpoint: the one given, or one in the checkpoint's own folder.

    Raises:
        CheckpointError: the folder given holds no adapter.
    """
    if given is not None:
        if not (Path(given) / CONFIG).is_file():
            raise CheckpointError(f"{given}: no {CONFIG} there; expected the folder of a LoRA adapter")
        return Path(given)
    places = () if folder is None else (folder, folder / FOLDER)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder.

    Raises:
        CheckpointError: no config, no safetensors, or a kind other than LoRA.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: not readable as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{folder}: an adapter of the kind {kind}; deepen brings LORA adapters along")
    if config.get("layer_replication"):
        raise CheckpointError(f"{folder}: layer_replication changes the depth by itself; write it as a program instead")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: not readable: {error}; adapters are read as safetensors") from error
    return Adapter(config, tensors)


def moved_adapter(ck: Checkpoint, adapter: Adapter, layers: Mapping[str, tuple[NewLayer, ...]]) -> Adapter:
    """The adapter of a checkpoint with these layers: that of each new layer is that of the layer it comes from.

    Raises:
        SaveError: it acts on a matrix that the new layer zeroes or scales.
        FamilyError: a pattern in its config names layers by number.
    """
    names = layer_names(ck, layers)
    _refuse_factors(ck, adapter, layers, names)
    tensors = {
        PREFIX + new: tensor.clone()
        for name, tensor in adapter.tensors.items()
        for new in names.renamed(name.removeprefix(PREFIX))
    }
    config = dict(adapter.config)
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "target_parameters"):
        value = config.get(key)
        if isinstance(value, str):
            names.renamed(value)  # a pattern that names no layer stays
        elif value:
            config[key] = names.rewritten(value)
    if isinstance(config.get("layers_to_transform"), int):
        config["layers_to_transform"] = [config["layers_to_transform"]]
    if listed := config.get("layers_to_transform"):
        moves = names.moves[ck.family.tower("").name]
        config["layers_to_transform"] = sorted(new for old in listed for new in moves.get(old, ()))
    if not tensors:
        raise SaveError(f"{ck.where}: the adapter acts on none of the layers that are left; leave it out")
    return Adapter(config, tensors)


def _refuse_factors(
    ck: Checkpoint, adapter: Adapter, layers: Mapping[str, tuple[NewLayer, ...]], names: LayerNames
) -> None:
    for tower, chosen in layers.items():
        outputs = ck.family.tower(tower).parts.outputs
        for index, new in enumerate(chosen):
            patterns = [pattern for letter in new.factors for pattern in outputs.get(letter, ())]
            for name in adapter.tensors:
                module = name.removeprefix(PREFIX).split(".lora_")[0]
                if names.layer(module) != (tower, new.stored):
                    continue
                inside = module.split(f".{new.stored}.", 1)[1]
                if output_tensors({f"{inside}.weight": module}, patterns):
                    raise SaveError(
                        f"{ck.where}: layer {index} of the result has its {inside} zeroed or scaled, and the adapter "
                        "acts on it; merge the adapter into the model first"
                    )


def save_adapter(ck: Checkpoint, folder: Path, layout: Layout) -> tuple[str, ...]:
    """Writes the adapter, if there is one, into `folder`/adapter.

    Returns:
        What the reader should know.
    """
    if ck.adapter is None:
        return ()
    moved = moved_adapter(ck, read_adapter(ck.adapter), layout.layers)
    (folder / FOLDER).mkdir()
    save_file(dict(moved.tensors), folder / FOLDER / WEIGHTS, metadata={"format": "pt"})
    with atomic_file(folder / FOLDER / CONFIG) as file:
        json.dump({**moved.config, "base_model_name_or_path": None}, file, indent=2)
        file.write("\n")
    return ("the adapter is in the folder adapter, for PeftModel.from_pretrained",)


def apply_adapter(ck: Checkpoint, model: PreTrainedModel, layers: Mapping[str, tuple[NewLayer, ...]]) -> None:
    """Puts the adapter, if there is one, on a model whose layer lists hold these layers.

    Raises:
        CheckpointError: peft is not installed, or the adapter does not fit the model.
    """
    if ck.adapter is None:
        return
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise CheckpointError(
            f"{ck.adapter}: holds an adapter, which needs peft: install deepen[peft], or move the adapter away"
        ) from error
    moved = moved_adapter(ck, read_adapter(ck.adapter), layers)
    info: Any = model.load_adapter(
        adapter_state_dict={name.removeprefix(PREFIX): tensor for name, tensor in moved.tensors.items()},
        peft_config=LoraConfig.from_peft_type(**moved.config),  # pyright: ignore[reportArgumentType]
    )
    lost = sorted(info.unexpected_keys) + sorted(name for name in info.missing_keys if "lora_" in name)
    if lost:
        raise CheckpointError(f"{ck.adapter}: the adapter does not fit the model: {', '.join(lost[:3])}")
