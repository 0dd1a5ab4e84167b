"""How a checkpoint says which of its feed-forwards are split into experts.

The config of the native form states it by tower and layer:

    "experts": {"text": {"3": {"experts": 12, "active": 3, "router": "mlp"}}}

The matrices are those of the whole feed-forward: a baked checkpoint, where every expert runs, leaves the routers out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.experts import ROUTER, Split
from deepen.checkpoint.recipes import Recipe
from deepen.errors import CheckpointError, SaveError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.layout import NewLayer


def stored_experts(ck: Checkpoint, layers: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The splits as the native config states them, by the place of each stored layer in `layers`; empty if none."""
    found = {
        name: {str(at): asdict(ck.experts[name][layer]) for at, layer in enumerate(stored) if layer in ck.experts[name]}
        for name, stored in layers.items()
        if name in ck.experts
    }
    return {"experts": found} if any(found.values()) else {}


def read_experts(raw: Mapping[str, Any], banks: Mapping[str, Sequence[int]], where: str) -> dict[str, dict[int, Split]]:
    """The splits that a native config states.

    Raises:
        CheckpointError: they are not splits of stored layers.
    """
    given = raw.get("experts", {})
    found: dict[str, dict[int, Split]] = {}
    try:
        for name, layers in given.items():
            found[name] = {range(len(banks[name]))[int(layer)]: Split(**split) for layer, split in layers.items()}
            for split in found[name].values():
                if not (type(split.experts) is type(split.active) is int and isinstance(split.router, str)):
                    raise TypeError
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CheckpointError(
            f"{where}: experts must give layers of a tower ({', '.join(banks)}) a split, such as "
            f'{{"text": {{"3": {{"experts": 12, "active": 3, "router": "mlp"}}}}}}, got {json.dumps(given)}'
        ) from None
    return found


def needs_experts(ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]]) -> str | None:
    """Why the plain format would lose the experts of these layers, or None."""
    for name, chosen in layers.items():
        for at, new in enumerate(chosen):
            if (split := ck.experts.get(name, {}).get(new.stored)) is not None:
                return f"native form: the feed-forward of layer {at} runs {split.active} of {split.experts} experts"
    return None


def made_whole(
    ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]], tensors: Mapping[str, Recipe], notes: list[str]
) -> dict[str, Recipe]:
    """The tensors without the routers of feed-forwards that run all their experts; `notes` says how many there are.

    Raises:
        SaveError: a feed-forward runs only some of its experts; named.
    """
    made, count = dict(tensors), 0
    for name, chosen in layers.items():
        for at, new in enumerate(chosen):
            split = ck.experts.get(name, {}).get(new.stored)
            if split is None:
                continue
            if split.active < split.experts:
                raise SaveError(
                    f"bake: the feed-forward of layer {at} runs {split.active} of {split.experts} experts, and a plain "
                    "checkpoint runs whole feed-forwards; let all of them act with deepen.activate, or save without "
                    "--bake"
                )
            stem = f"{ck.disk[name].prefix}.{at}."
            for full in [full for full in made if full.startswith(stem) and f".{ROUTER}." in full]:
                del made[full]
            count += 1
    if count:
        notes.append(f"{count} feed-forwards of experts are written whole, without routers: all their experts act")
    return made
