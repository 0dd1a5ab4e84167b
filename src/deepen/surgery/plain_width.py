"""Feed-forward widths of a checkpoint: stated in the family's config where all layers have one, else layer by layer."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.depth_fields import scope, scope_object
from deepen.errors import DeepenError, FamilyError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower

# What configs call the width of a feed-forward.
FIELDS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "inner_dim", "hidden_dim")


def with_width(old: Checkpoint, made: Checkpoint, tower: Tower, widths: Mapping[int, int]) -> Checkpoint:
    """`made` with these feed-forward widths; the config states them where every visited layer has the same one.

    Args:
        old: the checkpoint whose tensors `made` changed.
        made: what gets the widths.
        tower: the tower.
        widths: of the stored layers that changed.
    """
    from deepen.checkpoint.widths import bank_modules, feed_forward

    if not widths:
        return made
    known: dict[int, int] = {}
    for layer, module in enumerate(bank_modules(old, tower)):
        try:
            known[layer] = feed_forward(module, tower.parts, old.where).width
        except FamilyError:
            # A layer of experts among dense ones: its width is no single one, and stays.
            continue
    now = {**known, **widths}
    visited = Counter(now.get(key.layer) for key in old.plan(tower.name).keys)
    config = None
    if len(visited) == 1 and len(now) == old.depth[tower.name]:
        config = _config(old, tower, next(iter(widths.values())))
    if config is None:
        own = {**old.widths.get(tower.name, {}), **widths}
        return replace(made, widths={**made.widths, tower.name: own})
    usual = next(iter(widths.values()))
    own = {layer: width for layer, width in now.items() if width != usual}
    rest = {name: each for name, each in made.widths.items() if name != tower.name}
    return replace(made, config=config, widths={**rest, **({tower.name: own} if own else {})})


def _config(ck: Checkpoint, tower: Tower, width: int) -> dict[str, Any] | None:
    """The config with another feed-forward width and nothing else changed, or None if it cannot state it."""
    from deepen.checkpoint.skeleton import Skeleton, settings
    from deepen.checkpoint.widths import widened

    if len(ck.family.towers) > 1:
        return None
    built = scope_object(ck.skeleton.config, tower)
    for name in FIELDS:
        if not isinstance(getattr(built, name, ""), int | None):
            continue
        config = copy.deepcopy(dict(ck.config))
        scope(config, tower)[name] = width
        try:
            layers = Skeleton(ck.family, config, ck.where).layers(tower)
            expected = [widened(layer, tower, width, ck.where) for layer in ck.skeleton.layers(tower)]
        except DeepenError:
            continue
        if all(_alike(settings(one), settings(two), width) for one, two in zip(layers, expected, strict=True)):
            return config
    return None


def _alike(built: Mapping[str, Any], expected: Mapping[str, Any], width: int) -> bool:
    """Whether two layers differ in nothing but the width that a module has noted."""
    differing = [name for name in built.keys() | expected.keys() if built.get(name) != expected.get(name)]
    return all(built.get(name) == width for name in differing)
