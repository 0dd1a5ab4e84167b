"""The register of published methods: which file implements what, from which source.

    @method(
        "deepnorm", family="wiring", source="arXiv:2203.00555", title="DeepNet", mechanism="norm(a x + f(x))", cost="-"
    )
    class DeepNorm: ...

A method registers itself where it is defined. The modules that define methods are listed in `MODULES`, and imported
only when somebody asks; importing this module imports nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from deepen.errors import UsageError, nearest

T = TypeVar("T", bound=Callable[..., Any])

# Every module that defines methods, in the order in which they are listed.
MODULES: tuple[str, ...] = (
    "deepen.wiring.pre_ln",
    "deepen.wiring.post_ln",
    "deepen.wiring.sandwich",
    "deepen.wiring.depth_scaled_sandwich",
    "deepen.wiring.deepnorm",
    "deepen.wiring.deeploop",
    "deepen.wiring.looped_scaling",
    "deepen.wiring.layer_scale",
    "deepen.wiring.rezero",
    "deepen.wiring.denseformer",
    "deepen.wiring.elc_bert",
    "deepen.wiring.hyper_connections",
    "deepen.wiring.manifold_hyper_connections",
    "deepen.wiring.orthogonal_hyper_connections",
    "deepen.wiring.deep_delta",
    "deepen.wiring.deep_delta_matrix",
    "deepen.wiring.attention_residuals",
    "deepen.wiring.cross_layer_attention",
    "deepen.probe.scores.block_influence",
    "deepen.probe.scores.angular",
    "deepen.probe.scores.contribution",
    "deepen.probe.scores.geometry",
    "deepen.probe.scores.effective_rank",
    "deepen.probe.scores.cka",
    "deepen.probe.scores.attention",
    "deepen.probe.scores.lens",
    "deepen.probe.scores.removal",
    "deepen.probe.scores.effects",
    "deepen.probe.scores.taylor",
    "deepen.probe.scores.magnitude",
    "deepen.probe.scores.memory",
    "deepen.surgery.drop",
    "deepen.surgery.loop",
    "deepen.surgery.parallel",
    "deepen.surgery.merge",
    "deepen.surgery.fuse",
    "deepen.surgery.replace",
    "deepen.surgery.tie",
    "deepen.surgery.relax",
    "deepen.surgery.layermerge",
    "deepen.surgery.narrow",
    "deepen.surgery.lowrank",
    "deepen.surgery.widen",
    "deepen.surgery.upscale",
    "deepen.surgery.expand",
    "deepen.surgery.stack",
    "deepen.surgery.learngene",
    "deepen.surgery.retrofit",
    "deepen.adaptive.search.random",
    "deepen.adaptive.search.contiguous",
    "deepen.adaptive.search.greedy",
    "deepen.adaptive.search.beam",
    "deepen.adaptive.search.evolution",
    "deepen.adaptive.search.mcts",
    "deepen.train.selective.fisher",
    "deepen.train.selective.inflection",
    "deepen.train.selective.slices",
    "deepen.train.selective.subnets",
    "deepen.train.selective.languages",
    "deepen.train.selective.entries",
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A published technique and where it is implemented.

    Attributes:
        name: what recipes and the command line call it.
        family: which axis it belongs to: `wiring`, `mixer`, `transform` ...
        source: where it was published, such as `arXiv:2203.00555`.
        title: the title there.
        mechanism: what it does, in one line.
        cost: what it costs over doing nothing, in one line.
        implementation: the class or function.
        file: the file that defines it, relative to the package's parent folder.
    """

    name: str
    family: str
    source: str
    title: str
    mechanism: str
    cost: str
    implementation: Callable[..., Any]
    file: str

    def to_json(self) -> dict[str, str]:
        names = ("name", "family", "source", "title", "mechanism", "cost", "file")
        return {name: getattr(self, name) for name in names}


_METHODS: dict[str, Method] = {}


def method(name: str, *, family: str, source: str, title: str, mechanism: str, cost: str) -> Callable[[T], T]:
    """Registers the decorated class or function under `name`; see `Method` for the other fields.

    Raises:
        ValueError: the name is taken, or a field is empty.
    """
    given = {"family": family, "source": source, "title": title, "mechanism": mechanism, "cost": cost}
    if empty := [field for field, value in {"name": name, **given}.items() if not value.strip()]:
        raise ValueError(f"method {name!r}: {empty[0]} is empty; say it in one line")

    def register(implementation: T) -> T:
        if name in _METHODS:
            raise ValueError(f"method {name!r} is registered twice, the first time in {_METHODS[name].file}")
        module = implementation.__module__
        stem = module.replace(".", "/")
        is_package = inspect.getsourcefile(implementation) or ""
        file = f"{stem}/__init__.py" if is_package.endswith("__init__.py") else f"{stem}.py"
        _METHODS[name] = Method(name=name, implementation=implementation, file=file, **given)
        return implementation

    return register


def methods(family: str = "") -> Iterator[Method]:
    """All methods, or those of one family, by family and name.

    Raises:
        UsageError: no method has this family.
    """
    _import_all()
    known = {found.family for found in _METHODS.values()}
    if family and family not in known:
        among = f"known are {', '.join(sorted(known))}" if known else "none is registered yet"
        raise UsageError(f"no method of the family {family!r}{nearest(family, known)}; {among}")
    chosen = [found for found in _METHODS.values() if family in ("", found.family)]
    return iter(sorted(chosen, key=lambda found: (found.family, found.name)))


def lookup(name: str) -> Method:
    """The method of this name.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    _import_all()
    if name not in _METHODS:
        raise UsageError(
            f"no method {name!r}{nearest(name, _METHODS)}; `deepen methods` lists the {len(_METHODS)} known"
        )
    return _METHODS[name]


def _import_all() -> None:
    for module in MODULES:
        import_module(module)
