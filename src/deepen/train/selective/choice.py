"""The modes of healing that train a selection, with their options, and the selection that each starts with.

fim         the `count` layers with the largest Fisher information
inflection  LoRA in the band of inflection layers
slicefine   a slice of `width` of every matrix, which moves along `order` every `every` steps
losia       subnets of a `share` of rows and columns, localised anew in windows of `every` steps
slam        feed-forwards of the `count` layers that differ most between the text and `others`, or of layers named
spu         a `share` of the entries of the first feed-forward matrices

The others of their layers' weights, and all outside of the layers, stay frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepen.errors import UsageError
from deepen.train.data import Batches, batches_of
from deepen.train.select import select_layers
from deepen.train.selective.entries import entries
from deepen.train.selective.fisher import fisher_layers
from deepen.train.selective.languages import differing_layers, feed_forward_selection
from deepen.train.selective.matrices import bank, matrices
from deepen.train.selective.selection import Selection
from deepen.train.selective.slices import Order, slices
from deepen.train.selective.subnets import subnets_pro

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase

SELECTIVE = ("fim", "inflection", "slicefine", "losia", "slam", "spu")
# The modes that take an option, and what it is where it is not given.
TAKES: dict[str, dict[str, Any]] = {
    "count": {"fim": 3, "slam": 6},
    "width": {"slicefine": 8},
    "order": {"slicefine": "columns"},
    "every": {"slicefine": 500, "losia": 100},
    "share": {"losia": 0.125, "spu": 0.1},
    "others": {"slam": ()},
}
# Windows of a text that layers are chosen by, at most.
EXAMPLES = 100


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of the selective modes; None takes the default of the mode.

    Attributes:
        count: layers to choose.
        width: columns or rows of a slice.
        order: how slices move.
        every: steps between two moves, or of a window.
        share: of rows and columns, or of entries.
        others: texts in other languages than the one that is trained on.
    """

    count: int | None = None
    width: int | None = None
    order: Order | None = None
    every: int | None = None
    share: float | None = None
    others: tuple[str, ...] = ()

    def of(self, mode: str) -> dict[str, Any]:
        """The options of a mode, defaults filled in."""
        given = asdict(self)
        return {
            name: defaults[mode] if given[name] in (None, ()) else given[name]
            for name, defaults in TAKES.items()
            if mode in defaults
        }

    def settings(self, mode: str) -> dict[str, Any]:
        """What a resumed run must share."""
        found = self.of(mode)
        texts = found.pop("others", ())
        return found | {"others": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]}

    def require(self, mode: str, layers: Sequence[int | str]) -> None:
        """Refuses options of other modes, and layers where the mode chooses them.

        Raises:
            UsageError: that.
        """
        for name, defaults in TAKES.items():
            if getattr(self, name) not in (None, ()) and mode not in defaults:
                option = "--other" if name == "others" else f"--{name}"
                modes = " and ".join(f"--mode {each}" for each in defaults)
                raise UsageError(f"{option} is about {modes}; name the mode or leave it out")
        if mode in ("fim", "inflection") and layers:
            raise UsageError(f"--mode {mode} chooses the layers itself; leave --layers out")
        if mode == "slam" and bool(layers) == bool(self.others):
            raise UsageError(
                "--mode slam takes texts in other languages (--other FILE) to choose layers by, or the layers "
                "themselves (--layers 3,5); give one of the two"
            )
        if mode == "slam" and layers and self.count is not None:
            raise UsageError("--count and --layers both say which layers are trained; give one")


def start(
    mode: str,
    choice: Choice,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    *,
    tower: str,
    layers: Sequence[int | str],
    batch: int,
    seed: int,
) -> tuple[Selection | None, tuple[int | str, ...]]:
    """Leaves trainable what a mode selects; `inflection` is LoRA and not among them.

    Args:
        mode: one of `SELECTIVE`.
        choice: its options.
        model: a model that `Checkpoint.load` gave.
        tokenizer: of the model.
        batches: of the text.
        tower: the tower of the layers.
        layers: layers that are named; none is all, or leaves the choice to the mode.
        batch: windows that are read at once.
        seed: of all draws.

    Returns:
        The selection, None where whole layers are trained; and the layers.

    Raises:
        UsageError: an option out of range.
        DataError: too little text, or gradients that are not finite.
        FamilyError: a model without the matrices that the mode trains.
    """
    options = choice.of(mode)
    windows, first, layers = batches.windows, batches.scored_from, tuple(layers)
    if mode == "fim":
        layers, _ = fisher_layers(model, windows[:EXAMPLES], tower, options["count"], scored_from=first)
        select_layers(model, layers, tower)
        return None, layers
    if mode == "slam":
        if not layers:
            context = windows.shape[1]
            others = [batches_of(tokenizer, each, context=context, batch=1).windows for each in options["others"]]
            languages = [each[:EXAMPLES] for each in (windows, *others)]
            layers, _ = differing_layers(model, languages, tower, options["count"], batch=batch)
        return feed_forward_selection(model, tower, layers), layers
    if mode == "spu":
        share = options["share"]
        return entries(model, windows, tower, layers, share=share, batch=batch, scored_from=first), layers
    if mode == "losia":
        groups = [matrices(model, tower, [layer]) for layer in layers or bank(model, tower)]
        return subnets_pro(model, groups, share=options["share"], every=options["every"], seed=seed), layers
    names = matrices(model, tower, layers)
    return slices(model, names, **options, seed=seed), layers
