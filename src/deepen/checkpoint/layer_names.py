r"""Names of modules that lie beside a checkpoint (ignore lists, adapters), brought along when layers move.

model.layers.3.self_attn.q_proj     ->  model.layers.1.self_attn.q_proj, once for each new layer made of layer 3
lm_head                             ->  lm_head
re:.*self_attn.*                    ->  itself: it names no layer
re:.*layers\.3\..*                   ->  refused: a pattern cannot be renumbered
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepen.errors import FamilyError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.layout import NewLayer

FIRST_NUMBER = re.compile(r"(.+?)\.(\d+)((?:\..*)?)", re.DOTALL)
# Characters that make a name a pattern.
PATTERN = re.compile(r"[\\*+?\[\](){}|^$:]")


@dataclass(frozen=True)
class LayerNames:
    """Renames what belongs to a layer.

    Attributes:
        where: what errors call the checkpoint.
        lists: for each tower, the names of its layer list, in files and in the model.
        moves: for each tower, the new layers that each old one becomes.
    """

    where: str
    lists: Mapping[str, tuple[str, ...]]
    moves: Mapping[str, Mapping[int, tuple[int, ...]]]

    @property
    def still(self) -> bool:
        """Whether every layer keeps its number."""
        return all(new == (old,) for moves in self.moves.values() for old, new in moves.items())

    def renamed(self, name: str) -> list[str]:
        """The names that take the place of `name`; none when its layer is gone.

        Raises:
            FamilyError: a pattern with the number of a layer, or a list that two towers might mean.
        """
        if PATTERN.search(name):
            return [self._pattern(name)]
        match = FIRST_NUMBER.fullmatch(name)
        tower = self._tower(match[1]) if match else None
        if match is None or tower is None:
            return [name]
        return [f"{match[1]}.{new}{match[3]}" for new in self.moves[tower].get(int(match[2]), ())]

    def layer(self, name: str) -> tuple[str, int] | None:
        """The tower and old number of the layer that a name belongs to."""
        match = FIRST_NUMBER.fullmatch(name)
        tower = self._tower(match[1]) if match else None
        return None if match is None or tower is None else (tower, int(match[2]))

    def rewritten(self, value: Any) -> Any:
        """A JSON value with the names in its lists and the keys of its objects renamed."""
        if isinstance(value, Mapping):
            return {new: self.rewritten(item) for key, item in value.items() for new in self.renamed(key)}
        if isinstance(value, list):
            return [new for item in value for new in (self.renamed(item) if isinstance(item, str) else [item])]
        return value

    def _tower(self, path: str) -> str | None:
        ends = {
            tower: any(f".{path}".endswith(f".{full}") or f".{full}".endswith(f".{path}") for full in lists)
            for tower, lists in self.lists.items()
        }
        found = [tower for tower, fits in ends.items() if fits]
        if len(found) > 1:
            found = [tower for tower in found if any(f".{path}".endswith(f".{full}") for full in self.lists[tower])]
            if len(found) != 1:
                raise FamilyError(f"{self.where}: {path!r} may mean the layers of several towers; write the full name")
        return found[0] if found else None

    def _pattern(self, name: str) -> str:
        ends = {full.rpartition(".")[2] for lists in self.lists.values() for full in lists}
        if not self.still and any(re.search(rf"\b{end}\\?\.[\[(]?\\?\d", name) for end in ends):
            raise FamilyError(
                f"{self.where}: the pattern {name!r} names layers by number, which change; replace it by the full "
                "names of the modules"
            )
        return name


def layer_names(ck: Checkpoint, layers: Mapping[str, Sequence[NewLayer]]) -> LayerNames:
    """For a checkpoint whose towers become `layers`."""
    lists = {}
    moves: dict[str, dict[int, tuple[int, ...]]] = {}
    for tower in ck.family.towers:
        lists[tower.name] = tuple(dict.fromkeys((ck.disk[tower.name].prefix, ck.skeleton.container(tower))))
        chosen = [new.stored for new in layers[tower.name]]
        moves[tower.name] = {
            old: tuple(new for new, stored in enumerate(chosen) if stored == old) for old in range(ck.depth[tower.name])
        }
    return LayerNames(ck.where, lists, moves)


def quantisation(config: Mapping[str, Any], names: LayerNames) -> dict[str, Any]:
    """The config with the ignore lists and settings of single modules of its quantisation renamed."""
    new = dict(config)
    if isinstance(value := new.get("quantization_config"), Mapping):
        new["quantization_config"] = names.rewritten(value)
    return new
