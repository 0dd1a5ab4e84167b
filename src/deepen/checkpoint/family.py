"""What deepen must know about a model family, and what it refuses to guess.

A family is data: which lists of layers the model has (its towers), where the config keeps their depth, which
submodules are the parts of a layer, and which matrices write to the residual stream. Config fields that depend on
depth are known by name in `depth_fields`; everything a family declares is checked against the real model class by
`skeleton`, so a wrong entry is an error and never a wrong model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepen.errors import FamilyError, nearest

Kind = Literal["serial", "parallel", "single", "whole"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How one layer divides into a mixer `a` and a feed-forward `f`.

    Attributes:
        kind: `serial` (x + a, then x + f), `parallel` (x + a + f), `single` (only one part), or `whole` (parts that
            cannot be run alone; `reason` says why).
        mixer: submodule names that may hold the mixer; a layer uses the first that it has. `x+y` is a mixer that two
            submodules make up.
        feed_forward: submodule names that may hold the feed-forward.
        outputs: per part, the modules whose weight and bias write to the residual stream; those a layer lacks are
            skipped (a hybrid layer has one mixer out of several).
        returns: how many values a part returns, by its class, where the annotation of its forward does not say.
        post_norm: the stream is changed outside the parts, by a norm after each addition or by a factor, so no layer
            can be made the identity.
        reason: why `.a` and `.f` are refused for a `whole` layer.
    """

    kind: Kind = "serial"
    mixer: tuple[str, ...] = ("self_attn",)
    feed_forward: tuple[str, ...] = ("mlp",)
    outputs: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"a": ("self_attn.o_proj",), "f": ("mlp.down_proj",)}
    )
    returns: Mapping[str, int] = field(default_factory=dict)
    post_norm: bool = False
    reason: str = ""

    @property
    def letters(self) -> str:
        return "a" if self.kind == "single" else "af"


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A tensor outside the layers that holds one block a layer along one axis.

    Attributes:
        name: the end of its name, in files and in the model, such as `embed_tokens_per_layer.weight`.
        axis: the axis that is as long as the depth times the width of a block.
        reads: the axis counts inputs: one block a layer is read, not given.
    """

    name: str
    axis: int
    reads: bool = False


@dataclass(frozen=True, kw_only=True)
class Tower:
    """One stack of layers of a model.

    Attributes:
        name: `text`, `encoder`, `decoder`, `vision` or `audio`.
        container: the end of the module path of the layer list, such as `layers` or `encoder.block`.
        depth: dotted config key of the number of layers.
        caches: whether its visits keep keys, values or recurrent states between calls.
        parts: how its layers divide.
        first: parameters, relative to a layer, that only the first layer executed may own (T5's relative bias).
        live: attributes of the config object that the running tower reads as its depth.
        on_disk: full prefixes of the layers as files name them, where transformers renames them on loading.
        foreign: per-layer lists of its config that describe another tower.
        repeats: config key of the number of visits, for a class that itself visits each layer several times in a row
            and spreads the visits evenly (ALBERT).
        slabs: tensors outside the layers with one block a layer.
        neutral: attributes of the module that holds the list which name a layer only to save work, and the value
            under which they do nothing.
        joins: dotted config key of a list; the class adds one stream of another tower for each of its entries, one
            after each of the first visits of this tower (deepstack).
        crosses: dotted config key of the layers that attend to another tower and keep its keys in their cache entry,
            which the class looks up by the number of the visit.
    """

    name: str
    container: str
    depth: str = "num_hidden_layers"
    caches: bool = False
    parts: Parts = Parts()
    first: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    repeats: str = ""
    slabs: tuple[Slab, ...] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    joins: str = ""
    crosses: str = ""

    @property
    def depth_attributes(self) -> tuple[str, ...]:
        return self.live or (self.depth.rsplit(".", 1)[-1],)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type.

    Attributes:
        model_type: as in config.json.
        towers: its layer lists.
        tiny: config values of the tiny model that the parity suite builds.
        features: config fields (dotted) that number a hidden state of a tower, which another part reads, to that
            tower: 0 is the stream before the first layer, i the stream after layer i - 1.
        taps: the same for fields that number the layer itself: i is the stream after layer i.
        inputs: makes inputs for the tiny model, where the usual ones do not do.
        folds_index: config switches that divide by the layer number, to the fused projection whose query takes it up.
    """

    model_type: str
    towers: tuple[Tower, ...]
    tiny: Mapping[str, Any]
    features: Mapping[str, str] = field(default_factory=dict)
    taps: Mapping[str, str] = field(default_factory=dict)
    inputs: Callable[[Any, int], dict[str, Any]] | None = None
    folds_index: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_tower(self) -> str | None:
        """The tower an unnamed program speaks of: the text decoder, else the only one, else None."""
        names = [tower.name for tower in self.towers]
        if "text" in names:
            return "text"
        return names[0] if len(names) == 1 else None

    def tower(self, name: str) -> Tower:
        """The tower called `name`; the empty name means the default one.

        Raises:
            FamilyError: no tower of that name, or the empty name is ambiguous.
        """
        if not name:
            default = self.default_tower
            if default is None:
                names = ", ".join(tower.name for tower in self.towers)
                raise FamilyError(
                    f"a {self.model_type} model has several towers ({names}); name one, for example "
                    f"'{self.towers[0].name}: 0-3'"
                )
            name = default
        for tower in self.towers:
            if tower.name == name:
                return tower
        names = [tower.name for tower in self.towers]
        raise FamilyError(
            f"a {self.model_type} model has no tower {name!r}{nearest(name, names)}; its towers are {', '.join(names)}"
        )


FAMILIES: dict[str, Family] = {}


def register(*families: Family) -> None:
    """Adds families to the table; a model type may be registered once."""
    for family in families:
        if family.model_type in FAMILIES:
            raise ValueError(f"family {family.model_type!r} is registered twice")
        FAMILIES[family.model_type] = family


# Model types that were looked at and left out, to the reason.
REFUSED: dict[str, str] = {}


def refuse(reasons: Mapping[str, str]) -> None:
    """States why model types are not in the table."""
    REFUSED.update(reasons)


def known_families() -> Mapping[str, Family]:
    """Every registered family, the table included."""
    from deepen.checkpoint import families as _table  # noqa: F401  (importing registers)

    return FAMILIES


def family_of(config: Mapping[str, object], where: str) -> Family:
    """The family of a config.json.

    Raises:
        FamilyError: the config names no model type, or one that deepen does not know.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise FamilyError(f"{where}: config.json has no model_type; expected one such as 'llama'")
    known = known_families()
    if reason := REFUSED.get(model_type):
        raise FamilyError(f"{where}: the family {model_type!r} is refused: {reason}")
    if model_type not in known:
        raise FamilyError(
            f"{where}: deepen does not know the family {model_type!r}{nearest(model_type, known)}. Unknown families "
            f"are refused, never guessed; `deepen families` lists the {len(known)} known ones, CONTRIBUTING.md shows "
            "how to add one"
        )
    return known[model_type]
