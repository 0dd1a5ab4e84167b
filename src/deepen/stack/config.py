"""The configuration of a stack: frozen, typed, read from YAML or a dictionary.

layers: 8
program: 0-1 (2-5)*2 6-7
width: 256
heads: 4
wiring: {name: hyper-connections, streams: 4}
feed_forward: {name: moe, experts: 8, top: 2}
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deepen.errors import UsageError, nearest
from deepen.program.site import Depth
from deepen.registry import lookup, methods
from deepen.stack.heads import require_ends, untied
from deepen.stack.parametrisation import require_recipe, require_wiring
from deepen.stack.tables import read_tables
from deepen.stack.told import at, reason, told
from deepen.sublayers.ffn.base import FeedForward, Sizes
from deepen.sublayers.mixer.base import Heads, Mixer

# The family of a field that names a method, where it is called otherwise.
FAMILIES = {"feed_forward": "ffn"}


class StackConfig(BaseModel):
    """What a stack is built from.

    Attributes:
        layers: layers of the bank.
        program: which layer runs when; None runs each once, in order.
        width: D.
        heads: query heads.
        kv_heads: heads of keys and values; None: as many as query heads.
        head_width: width of a head; None: width / heads.
        hidden: hidden width of the feed-forward, or of each of its experts; None: 4 times the width, or 8/3 of it where
            a gate makes a third matrix.
        hidden_multiple: a hidden width that is not given is rounded up to a multiple of it; 1: to the nearest.
        vocabulary: number of token ids.
        context: the longest input, for learned positions and rotary tables.
        feed_forward: its name, or a table of its name and options.
        mixer: its name, or a table of its name and options.
        gelu: the form of the GELU, where the feed-forward has one.
        positions: `rotary`, `learned` or `none`.
        rotary_base: of rotary positions.
        causal: whether a token sees only itself and those before it.
        window: tokens that a query sees, itself included; None: all. A list gives one for each layer.
        qk_norm: whether queries and keys are normalised by head.
        norm: `rms` or `layer`.
        eps: of the norms.
        qkv_bias: whether queries, keys and values have a bias.
        bias: whether the other linear maps have one.
        tied: whether the head is the embedding.
        wiring: its name, or a table of its name and options.
        input: `tokens`, `patches` of images or `series`; see `deepen.stack.heads`.
        grams: lengths of n-grams of tokens whose embeddings are added to those of the tokens; see `deepen.stack.grams`.
        gram_rows: rows of the table of each length.
        image: channels, height and width of the images.
        channels: of the series.
        patch: pixels of a side of a patch, or points of a piece of a series.
        output: `tokens` or `classes`.
        classes: how many.
        pool: what classes are read from, the `mean` of all positions or the `last` one.
        init: the recipe of initial values; see `deepen.stack.init`. Where none is given, that of the parametrisation.
        parametrisation: how factors, initial values and rates follow from width and depth: a name, or a table of its
            name and options; see `deepen.stack.parametrisation`.
        depth: what constants of depth count, where a change of the program has kept them; None: the program.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(ge=1)
    program: str | None = None
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_width: int | None = Field(default=None, ge=1)
    hidden: int | None = Field(default=None, ge=1)
    hidden_multiple: int = Field(default=1, ge=1)
    vocabulary: int = Field(default=256, ge=1)
    context: int = Field(default=1024, ge=1)
    feed_forward: str | dict[str, Any] = "swiglu"
    mixer: str | dict[str, Any] = "softmax-attention"
    gelu: Literal["tanh", "none"] = "tanh"
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rotary_base: float = Field(default=10000.0, gt=0)
    causal: bool = True
    window: int | tuple[int | None, ...] | None = None
    qk_norm: bool = False
    norm: Literal["rms", "layer"] = "rms"
    eps: float = Field(default=1e-5, ge=0)
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = True
    wiring: str | dict[str, Any] = "pre-ln"
    input: Literal["tokens", "patches", "series"] = "tokens"
    grams: tuple[int, ...] = ()
    gram_rows: int = Field(default=32768, ge=1)
    image: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    channels: int = Field(default=1, ge=1)
    patch: int = Field(default=1, ge=1)
    output: Literal["tokens", "classes"] = "tokens"
    classes: int | None = Field(default=None, ge=1)
    pool: Literal["mean", "last"] = "mean"
    init: str = "gpt2"
    parametrisation: str | dict[str, Any] = "standard"
    depth: Depth | None = None

    @field_validator("wiring", "feed_forward", "mixer", "parametrisation")
    @classmethod
    def _known(cls, value: str | dict[str, Any], info: ValidationInfo) -> str | dict[str, Any]:
        family = str(info.field_name)
        what = family.replace("_", "-")
        table = {"name": value} if isinstance(value, str) else dict(value)
        if not isinstance(name := table.pop("name", None), str):
            raise ValueError(f"a {what} is a name, or a table with a name and its options")
        if name not in (known := [each.name for each in methods(FAMILIES.get(family, family))]):
            raise ValueError(f"no {what} {name!r}{nearest(name, known)}; known are {', '.join(known)}")
        options = list(inspect.signature(lookup(name).implementation).parameters)[1:]
        if unknown := next((option for option in table if option not in options), None):
            expected = f"it takes {', '.join(options)}" if options else "it takes none"
            raise ValueError(f"the {what} {name} has no option {unknown!r}{nearest(unknown, options)}; {expected}")
        types = get_type_hints(lookup(name).implementation.__init__, include_extras=True)  # pyright: ignore
        for option, given in table.items():
            try:
                TypeAdapter(types[option]).validate_python(given)
            except ValidationError as error:
                raise at(option, reason(error.errors()[0])) from None
        return value if table else name

    @model_validator(mode="before")
    @classmethod
    def _ends(cls, data: Any) -> Any:
        return untied(data)

    @model_validator(mode="after")
    def _fits(self) -> StackConfig:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"a width of {self.width} is not divisible by {self.heads} heads; change one, or give head_width"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly; use a divisor of heads")
        if self.positions == "rotary" and self.head % 2:
            raise ValueError(f"rotary positions turn pairs: a head width of {self.head} is odd")
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        if isinstance(self.window, tuple) and len(self.window) != self.layers:
            raise ValueError(f"window lists {len(self.window)} windows for {self.layers} layers")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError("a window holds 1 token or more; null means all of them")
        require_ends(self)
        self._require_parametrisation()
        # without memory: whether the options fit each other and the widths
        for name, make in (("feed_forward", self.new_feed_forward), ("mixer", lambda: self.new_mixer(windows[0]))):
            try:
                with torch.device("meta"):
                    make()
            except UsageError as error:
                raise ValueError(f"{name}: {error}") from None
        return self

    def _require_parametrisation(self) -> None:
        rule, _ = self.parametrisation_options
        kind, (wiring, _) = lookup(rule).implementation, self.wiring_options
        require_wiring(rule, kind, wiring, lookup(wiring).implementation.before)  # pyright: ignore
        if "init" in self.model_fields_set or not kind.recipes:  # pyright: ignore
            require_recipe(rule, kind, self.init)  # pyright: ignore
        else:
            object.__setattr__(self, "init", kind.recipes[0])  # pyright: ignore

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def inner(self) -> int:
        """The hidden width of the feed-forward, or of each of its experts."""
        if self.hidden is not None:
            return self.hidden
        name, options = _options(self.feed_forward)
        kind: Any = lookup(name).implementation
        usual, multiple = kind.usual_hidden(self.width, **options), self.hidden_multiple
        return round(usual) if multiple == 1 else multiple * math.ceil(int(usual) / multiple)

    def window_of(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.window[layer] if isinstance(self.window, tuple) else self.window

    @property
    def wiring_options(self) -> tuple[str, dict[str, Any]]:
        """The name of the wiring, and its options."""
        return _options(self.wiring)

    def new_feed_forward(self) -> FeedForward:
        """A feed-forward as the configuration names it.

        Raises:
            UsageError: its options do not fit each other or the widths.
        """
        name, options = _options(self.feed_forward)
        kind: Any = lookup(name).implementation
        sizes = Sizes(width=self.width, hidden=self.inner, bias=self.bias, gelu=self.gelu, vocabulary=self.vocabulary)
        return kind(sizes, **options)

    def new_mixer(self, window: int | None) -> Mixer:
        """A mixer as the configuration names it, of a layer with this window.

        Raises:
            UsageError: its options do not fit each other or the widths.
        """
        name, options = _options(self.mixer)
        kind: Any = lookup(name).implementation
        heads = Heads(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_width=self.head,
            window=window,
            qk_norm=self.qk_norm,
            bias=self.qkv_bias,
            out_bias=self.bias,
            eps=self.eps,
            causal=self.causal,
            context=self.context,
        )
        return kind(heads, **options)

    @property
    def parametrisation_options(self) -> tuple[str, dict[str, Any]]:
        """The name of the parametrisation, and its options."""
        return _options(self.parametrisation)

    @classmethod
    def read(cls, source: str | Path | dict[str, Any]) -> StackConfig:
        """A configuration from a YAML file or a dictionary.

        Raises:
            UsageError: names the file, the path of the key and, where one is close, the right key.
        """
        where = "stack" if isinstance(source, dict) else str(source)
        data = source if isinstance(source, dict) else read_tables(source)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise UsageError(f"{where}: {told(error, lambda _: cls.model_fields)}") from None


def _options(value: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(value, str):
        return value, {}
    return value["name"], {name: given for name, given in value.items() if name != "name"}
