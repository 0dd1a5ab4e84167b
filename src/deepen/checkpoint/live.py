"""The config of a running model, kept in step with its visits.

A Hugging Face forward looks up masks and kinds in the config by the running number of the layer it calls, and sizes
its cache by the depth there. With a program that number counts visits, so depth and lists are those of the visits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache

from deepen.checkpoint.depth_fields import INDEXES, LISTS, moved_features, scope_object, select_live
from deepen.checkpoint.family import Family, Tower
from deepen.program import Visit


class LiveConfig:
    """Brings the config of one tower along when the visits change.

    Args:
        model: the whole model.
        owner: the module that holds the tower's layer list.
        family: its family.
        tower: the tower.
        bank: the layer of the original model that each stored layer is.
        depth: layers of the original tower.
        where: what errors call the checkpoint.
    """

    def __init__(
        self, model: Any, owner: nn.Module, family: Family, tower: Tower, bank: Sequence[int], depth: int, where: str
    ) -> None:
        self.model, self.owner, self.family, self.tower = model, owner, family, tower
        self.bank, self.depth, self.where = tuple(bank), depth, where
        self.config: Any = getattr(owner, "config", model.config)
        self.original, self.top = copy.deepcopy(self.config), copy.deepcopy(model.config)
        # Some models copy a list when they are built.
        self.copied = [
            name
            for name in (*LISTS, *INDEXES)
            if name not in tower.foreign
            and name in vars(owner)
            and vars(owner)[name] == getattr(self.original, name, None)
        ]

        self.readers = {
            field: [module for module in model.modules() if field.rpartition(".")[2] in vars(module)]
            for field in (*family.features, *family.taps)
        }

    def follow(self, visits: Sequence[Visit]) -> None:
        """Sets depth, per-layer lists and feature layers for these visits.

        Raises:
            FamilyError: a layer that another part of the model reads after is not executed.
        """
        origins = [self.bank[visit.key.layer] for visit in visits]
        features = moved_features(self.top, self.family, self.tower, self.depth, origins, self.where)
        for name in self.tower.depth_attributes:
            setattr(self.config, name, len(visits))
        # generate() sizes its cache by the config of the whole model, which may be another object.
        setattr(scope_object(self.model.config, self.tower), self.tower.depth.rsplit(".", 1)[-1], len(visits))
        selected = select_live(self.config, self.original, self.tower, origins)
        for name in self.copied:
            setattr(self.owner, name, selected[name])
        for field, value in features.items():
            path, _, leaf = field.rpartition(".")
            for holder in (attrgetter(path)(self.model.config) if path else self.model.config, *self.readers[field]):
                setattr(holder, leaf, value)

    def cache_layers(self) -> list[Any]:
        """One fresh cache layer a visit."""
        return DynamicCache(config=self.config).layers
