"""The program of an original model: every layer once, or, for a class that repeats its layers (ALBERT), a loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from deepen.checkpoint.depth_fields import scope
from deepen.checkpoint.family import Family, Tower
from deepen.program import Program


def original_program(raw: Mapping[str, Any], family: Family, banks: Mapping[str, Sequence[int]]) -> Program:
    """The program of the original model: every layer once, or as often as the class itself visits it."""
    texts = {tower.name: _original_text(raw, tower, banks[tower.name]) for tower in family.towers}
    if len(texts) == 1:
        return Program.parse(next(iter(texts.values())))
    return Program.parse(" ".join(f"{name}: {text}" for name, text in texts.items()))


def _original_text(raw: Mapping[str, Any], tower: Tower, bank: Sequence[int]) -> str:
    depth = len(bank)
    visits = scope(copy.deepcopy(dict(raw)), tower).get(tower.repeats, depth) if tower.repeats else depth
    if visits == depth or list(bank) != list(range(depth)):
        return str(Program.identity(depth))
    order = spread(visits, depth)
    counts = {layer: order.count(layer) for layer in order}
    return " ".join(f"({layer})*{count}" if count > 1 else f"{layer}" for layer, count in counts.items())


def spread(visits: int, depth: int) -> list[int]:
    """The layer of each visit of a class that repeats its layers."""
    return [int(visit / (visits / depth)) for visit in range(visits)]
