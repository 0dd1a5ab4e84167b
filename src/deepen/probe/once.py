"""Reads the tensors of a checkpoint once for several programs.

Decoding a GGUF file or fetching shards takes longer than a short evaluation. Models that are loaded from the returned
checkpoint, and from what `apply` makes of it, may share their weights in memory: evaluate them, do not train them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.sources import ByteRange, Source, TensorInfo


@dataclass(frozen=True, eq=False)
class ReadOnce:
    """A source that keeps every tensor it has read."""

    source: Source
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self.source.infos

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.source.metadata

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.files

    def range(self, name: str) -> ByteRange | None:
        return self.source.range(name)

    def read(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = self.source.read(name)
        return self.kept[name]


def read_once(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, keeping in memory what it reads."""
    return replace(checkpoint, source=ReadOnce(checkpoint.source))
