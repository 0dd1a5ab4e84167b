"""The register of published methods: which file implements what, from which source.

    @method(
        "deepnorm", family="wiring", source="arXiv:2203.00555", title="DeepNet", mechanism="norm(a x + f(x))", cost="-"
    )
    class DeepNorm: ...

A method registers itself where it is defined. The modules that define methods are listed in `MODULES`. What a decorator
says is read from their text, so that a list of methods imports none of them; a method's module is imported when its
implementation is asked for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from deepen.errors import UsageError, nearest

T = TypeVar("T", bound=Callable[..., Any])

# Every module that defines methods, in the order in which they are listed.
MODULES: tuple[str, ...] = (
    "deepen.train.losses",
    "deepen.train.select",
    "deepen.train.noise",
    "deepen.train.rotation",
    "deepen.stack.parts",
    "deepen.wiring.pre_ln",
    "deepen.wiring.post_ln",
    "deepen.wiring.sandwich",
    "deepen.wiring.depth_scaled_sandwich",
    "deepen.wiring.deepnorm",
    "deepen.wiring.deeploop",
    "deepen.wiring.looped_scaling",
    "deepen.wiring.layer_scale",
    "deepen.wiring.rezero",
    "deepen.wiring.skipinit",
    "deepen.wiring.prores",
    "deepen.wiring.highway",
    "deepen.wiring.stochastic_depth",
    "deepen.wiring.layer_drop",
    "deepen.wiring.denseformer",
    "deepen.wiring.elc_bert",
    "deepen.wiring.vertical_attention",
    "deepen.wiring.muddformer",
    "deepen.wiring.deep_cross_attention",
    "deepen.wiring.hyper_connections",
    "deepen.wiring.manifold_hyper_connections",
    "deepen.wiring.identity_hyper_connections",
    "deepen.wiring.orthogonal_hyper_connections",
    "deepen.wiring.deep_delta",
    "deepen.wiring.deep_delta_matrix",
    "deepen.wiring.attention_residuals",
    "deepen.wiring.cross_layer_attention",
    "deepen.wiring.random_cross_layer_attention",
    "deepen.wiring.lime",
    "deepen.wiring.moda",
    "deepen.wiring.short_swa",
    "deepen.stack.shapes.resnet",
    "deepen.stack.shapes.vgg",
    "deepen.stack.shapes.prn",
    "deepen.stack.shapes.cspnet",
    "deepen.stack.shapes.elan",
    "deepen.stack.shapes.densenet",
    "deepen.stack.shapes.dla",
    "deepen.stack.shapes.fractalnet",
    "deepen.stack.shapes.dc_bilstm",
    "deepen.stack.shapes.feedback_transformer",
    "deepen.stack.shapes.recurrent_transformer",
    "deepen.stack.parametrisations.standard",
    "deepen.stack.parametrisations.depth_mup",
    "deepen.stack.parametrisations.completep",
    "deepen.stack.parametrisations.ds_init",
    "deepen.stack.parametrisations.layernorm_scaling",
    "deepen.stack.parametrisations.meta_principled",
    "deepen.stack.criticality",
    "deepen.sublayers.ffn.glu",
    "deepen.sublayers.ffn.bilinear",
    "deepen.sublayers.ffn.reglu",
    "deepen.sublayers.ffn.geglu",
    "deepen.sublayers.ffn.swiglu",
    "deepen.sublayers.ffn.relu",
    "deepen.sublayers.ffn.gelu",
    "deepen.sublayers.ffn.squared_relu",
    "deepen.sublayers.ffn.hash_layer",
    "deepen.sublayers.ffn.moe",
    "deepen.sublayers.ffn.moefied",
    "deepen.sublayers.ffn.peer",
    "deepen.sublayers.ffn.fast_feed_forward",
    "deepen.sublayers.ffn.master_leaf",
    "deepen.sublayers.ffn.ultra_fast",
    "deepen.sublayers.ffn.eugen",
    "deepen.sublayers.ffn.graph_memory",
    "deepen.sublayers.ffn.mask_block",
    "deepen.sublayers.ffn.projection",
    "deepen.sublayers.mixer.attention",
    "deepen.sublayers.mixer.all_attention",
    "deepen.sublayers.mixer.shallow_mixer",
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
    "deepen.probe.memories",
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
    "deepen.surgery.moefy",
    "deepen.surgery.factor_llm",
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
        file: the file that defines it, relative to the package's parent folder.
        module: the module that defines it.
    """

    name: str
    family: str
    source: str
    title: str
    mechanism: str
    cost: str
    file: str
    module: str
    made: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def implementation(self) -> Callable[..., Any]:
        """The class or function; its module is imported when it is not yet."""
        if self.made is not None:
            return self.made
        import_module(self.module)
        found = _METHODS[self.name].made
        assert found is not None
        return found

    def to_json(self) -> dict[str, str]:
        names = ("name", "family", "source", "title", "mechanism", "cost", "file")
        return {name: getattr(self, name) for name in names}


# What decorators have registered in this process.
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
        is_package = (inspect.getsourcefile(implementation) or "").endswith("__init__.py")
        file = f"{stem}/__init__.py" if is_package else f"{stem}.py"
        _METHODS[name] = Method(name=name, made=implementation, file=file, module=module, **given)
        return implementation

    return register


def methods(family: str = "") -> Iterator[Method]:
    """All methods, or those of one family, by family and name.

    Raises:
        UsageError: no method has this family.
    """
    listed = _listed().values()
    known = {found.family for found in listed}
    if family and family not in known:
        among = f"known are {', '.join(sorted(known))}" if known else "none is registered yet"
        raise UsageError(f"no method of the family {family!r}{nearest(family, known)}; {among}")
    chosen = [found for found in listed if family in ("", found.family)]
    return iter(sorted(chosen, key=lambda found: (found.family, found.name)))


def lookup(name: str) -> Method:
    """The method of this name.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    listed = _listed()
    if name not in listed:
        raise UsageError(f"no method {name!r}{nearest(name, listed)}; `deepen methods` lists the {len(listed)} known")
    return listed[name]


def _listed() -> dict[str, Method]:
    """The methods that the modules state, and those that decorators have registered."""
    return {**_stated(MODULES), **_METHODS}


@cache
def _stated(modules: tuple[str, ...]) -> dict[str, Method]:
    """What the decorators in these modules of the package say, read from their text.

    Raises:
        ValueError: two of them have one name.
    """
    found: dict[str, Method] = {}
    for module in modules:
        file = Path(*module.split(".")).with_suffix(".py")
        tree = ast.parse((Path(__file__).parents[1] / file).read_text(encoding="utf-8"))
        for call in (call for node in ast.walk(tree) for call in getattr(node, "decorator_list", ())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == method.__name__):
                continue
            name = ast.literal_eval(call.args[0])
            if name in found:
                raise ValueError(f"method {name!r} is registered twice, the first time in {found[name].file}")
            fields = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            found[name] = Method(name=name, file=file.as_posix(), module=module, **fields)
    return found
