"""Saving: stream the tensors to a sibling folder, check it, rename it into place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from deepen.checkpoint.adapter import save_adapter
from deepen.checkpoint.atomic import atomic_file, atomic_folder
from deepen.checkpoint.changes import Changes, changes
from deepen.checkpoint.layout import Layout
from deepen.checkpoint.recipes import NUMBERS, Cast, Recipe
from deepen.checkpoint.skeleton import build_config
from deepen.checkpoint.writer import check_written, write_weights
from deepen.errors import SaveError, nearest

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# Files that come along unchanged: tokenizer, chat template, processor, generation, licence. Never weights.
CARRIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
REWRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save(
    ck: Checkpoint,
    folder: Path,
    *,
    bake: bool = False,
    dtype: str | None = None,
    verify: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int], None] | None = None,
) -> Changes:
    """See `Checkpoint.save`."""
    layout = ck.layout(bake=bake)
    told = changes(ck, layout)
    tensors = dict(layout.tensors)
    extra: dict[str, Any] = {}
    if dtype is not None:
        tensors = {name: _cast(recipe, dtype) for name, recipe in tensors.items()}
        extra["dtype"] = TORCH_NAMES[dtype]
    inputs = [path for path in (ck.folder, ck.gguf) if path is not None]
    with atomic_folder(folder, forbidden=inputs) as partial:
        written = write_weights(partial, tensors, ck.source, max_shard_bytes=max_shard_bytes, progress=progress)
        write_config(partial, layout.config, extra)
        carry(ck, partial, layout)
        notes = save_adapter(ck, partial, layout)
        check_written(partial, tensors)
        difference = verify_saved(ck, partial) if verify else None
    return replace(told.with_files(written.files), max_logit_difference=difference, notes=told.notes + notes)


def _cast(recipe: Recipe, dtype: str) -> Recipe:
    """Floating tensors in another dtype; packed and integer tensors stay as they are."""
    if dtype not in TORCH_NAMES:
        raise SaveError(
            f"dtype {dtype!r} is unknown{nearest(dtype, TORCH_NAMES)}; expected one of {', '.join(TORCH_NAMES)}"
        )
    return Cast(recipe, dtype) if recipe.dtype in NUMBERS else recipe


def write_config(folder: Path, config: Mapping[str, Any], extra: Mapping[str, Any] = {}) -> None:
    """Writes config.json after checking that transformers accepts it, whole or not at all."""
    full = dict(config)
    inner = full["base"] = dict(full["base"]) if "base" in full else full
    if extra:
        inner.pop("torch_dtype", None)
        inner.update(extra)
    if "base" not in config:
        del full["base"]
    build_config(inner, str(folder))
    full["transformers_version"] = transformers.__version__
    with atomic_file(folder / "config.json") as file:
        json.dump(full, file, indent=2)
        file.write("\n")


def carry(ck: Checkpoint, folder: Path, layout: Layout) -> None:
    """Brings tokenizer, generation config, chat template and licence files along."""
    if ck.gguf is not None:
        ck.tokenizer().save_pretrained(folder)
        return
    if ck.folder is None:
        return
    for pattern in CARRIED:
        for path in sorted(ck.folder.glob(pattern)):
            if path.is_file() and path.name not in REWRITTEN and not path.name.startswith("adapter_"):
                shutil.copyfile(path, folder / path.name)
    generation = ck.folder / "generation_config.json"
    if generation.is_file():
        settings = json.loads(generation.read_text(encoding="utf-8"))
        with atomic_file(folder / "generation_config.json") as file:
            json.dump(remap_generation(ck, layout, settings), file, indent=2)
            file.write("\n")


def remap_generation(ck: Checkpoint, layout: Layout, settings: dict[str, Any]) -> dict[str, Any]:
    """Generation settings that name layers: Whisper's alignment heads are (decoder layer, head)."""
    if not settings.get("alignment_heads") or "decoder" not in layout.layers:
        return settings
    stored = [layer.stored for layer in layout.layers["decoder"]]
    heads = [
        [new, head] for old, head in settings["alignment_heads"] for new, source in enumerate(stored) if source == old
    ]
    return {**settings, "alignment_heads": heads}


def verify_saved(ck: Checkpoint, folder: Path) -> float:
    """Loads the saved folder and compares it with the model in memory on random inputs.

    Returns:
        The largest absolute difference of the outputs.

    Raises:
        SaveError: the outputs hold NaN or Inf, or differ by more than rounding explains.
    """
    from deepen.checkpoint.open import open_checkpoint
    from deepen.checkpoint.tiny import output_of, tiny_inputs

    memory = ck.load(dtype="float32")
    inputs = tiny_inputs(memory, tokens=16)
    expected = output_of(memory, inputs)
    if not torch.isfinite(expected).all():
        raise SaveError(
            f"{ck.where}: verify: the model in memory gives NaN or Inf; its weights are damaged or overflow"
        )
    got = output_of(open_checkpoint(folder).load(dtype="float32"), inputs)
    difference = (got - expected).abs().max().item()
    # Casting to a narrower type moves logits; the saved dtype decides what rounding explains.
    narrow = any(item.dtype in ("BF16", "F16") for item in open_checkpoint(folder).source.infos.values())
    allowed = (0.05 if narrow else 1e-4) * max(1.0, expected.abs().max().item())
    if not difference <= allowed:
        raise SaveError(
            f"verify: the saved checkpoint differs from the model in memory by {difference:.3g}, which "
            f"rounding does not explain (at most {allowed:.3g}); nothing was saved"
        )
    return difference
