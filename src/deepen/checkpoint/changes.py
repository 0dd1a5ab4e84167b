"""The dry run of a save: every config field and tensor that would differ from the opened checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.computed import computed_names
from deepen.checkpoint.layout import Form, Layout
from deepen.checkpoint.recipes import Copy, info

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class Changes:
    """What a save writes.

    Attributes:
        form: `plain`, `native` or `baked`.
        layers: for each tower, the stored layer that each written layer comes from.
        config: changed config fields, (before, after); None where absent.
        kept: names of tensors written as they are.
        renamed: tensors written as they are under another name, new name to old name.
        dropped: names of tensors that are not written.
        computed: names of tensors that are computed.
        parameters: values written.
        bytes: tensor bytes written.
        files: name and size of each file written; empty in a dry run.
        notes: what else the reader should know.
        max_logit_difference: largest absolute difference to the model in memory, when verified.
    """

    form: Form
    layers: Mapping[str, tuple[int, ...]]
    config: Mapping[str, tuple[Any, Any]]
    kept: tuple[str, ...]
    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    computed: tuple[str, ...]
    parameters: int
    bytes: int
    files: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    max_logit_difference: float | None = None

    def with_files(self, files: Mapping[str, int]) -> Changes:
        return replace(self, files=tuple(sorted(files.items())))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return asdict(self)


def changes(ck: Checkpoint, layout: Layout) -> Changes:
    """Compares a layout with the checkpoint that it was made from."""
    made = computed_names(ck.source)
    copies = {
        name: recipe.name
        for name, recipe in layout.tensors.items()
        if isinstance(recipe, Copy) and recipe.name not in made
    }
    used = set(copies.values()) | {
        old for name in layout.tensors.keys() - copies.keys() if (old := _origin(layout.tensors[name]))
    }
    infos = [info(recipe) for recipe in layout.tensors.values()]
    before = ck.config
    return Changes(
        form=layout.form,
        layers={tower: tuple(layer.stored for layer in layers) for tower, layers in layout.layers.items()},
        config={
            name: (before.get(name), layout.config.get(name))
            for name in sorted(before.keys() | layout.config.keys())
            if before.get(name) != layout.config.get(name)
        },
        kept=tuple(sorted(name for name, old in copies.items() if name == old)),
        renamed={name: old for name, old in sorted(copies.items()) if name != old},
        dropped=tuple(sorted(ck.source.infos.keys() - made - used)),
        computed=tuple(sorted(layout.tensors.keys() - copies.keys())),
        parameters=sum(prod(item.shape) for item in infos),
        bytes=sum(item.nbytes for item in infos),
        notes=layout.notes,
    )


def _origin(recipe: Any) -> str | None:
    """The name of the file tensor at the bottom of a chain of recipes."""
    while not isinstance(recipe, Copy):
        recipe = getattr(recipe, "recipe", None)
        if recipe is None:
            return None
    return recipe.name
