r"""Narrow feed-forwards: hidden channels of little weight go, and what they did may be left to the others.

    gate, up, in    rows K of [m, d], and of their biases           K: the channels that stay, m' of m
    down, out       columns K of [d, m]

    magnitude   c_j = |W_up[j]| + |W_gate[j]| + |W_down[:, j]|                          2-norms
    wanda       the same, each weight times the root mean square of what it reads (LoRAP's score)
    energy      c_j = mean of a_j^2 times |W_down[:, j]|^2                a: hidden values, [m], of mean mu
    taylor      c_j = mean of |a_j dL/da_j|

    compensate  W_down' = W_K + W_P G_PK (G_KK + r I)^-1            P: the channels that go, G = mean of a a'
                b_down' = b + W_P mu_P - (W_down' - W_K) mu_K       where there is a bias; G is then centred on mu

The compensation is the least-squares answer to W_down a on the calibration text. Its ridge r draws it to plain
slicing, so that its calibration error is never above that of slicing. Channels that are always zero cost nothing.

Cost: m'/m of the parameters and FLOPs of the feed-forwards. Where all layers keep one width, the result is a plain
checkpoint of the family; otherwise it is saved in the native form.

Scores: Li et al., LoRAP, arXiv:2404.09695 (wanda, and keeping the very least channels, `least`); Sun et al., Wanda,
arXiv:2306.11695; Ma et al., LLM-Pruner, arXiv:2305.11627 (taylor). The compensation is the ridge regression of
structured pruning with its ridge towards slicing instead of towards zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from deepen.checkpoint.computed import Computed, layer_tensors, with_tensors
from deepen.checkpoint.recipes import Copy, Recipe
from deepen.checkpoint.sources import TensorInfo
from deepen.errors import FamilyError, UsageError, nearest
from deepen.registry import method
from deepen.surgery.place import require_layers, tower_key
from deepen.surgery.plain_width import with_width
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower
    from deepen.checkpoint.widths import FeedForward
    from deepen.surgery.activations import Activations

Score = Literal["wanda", "magnitude", "energy", "taylor"]
SCORES = ("wanda", "magnitude", "energy", "taylor")
# The ridge of the compensation, relative to the mean square of a hidden value that stays.
RIDGE = 1e-2


@method(
    "narrow",
    family="surgery",
    source="arXiv:2404.09695",
    title="LoRAP: Transformer Sub-Layers Deserve Differentiated Structured Compression for Large Language Models",
    mechanism="hidden channels of the feed-forwards go by score; least squares may make up for them",
    cost="less feed-forward: m'/m of its parameters and FLOPs",
)
def narrow(
    ck: Checkpoint,
    activations: Activations | None = None,
    *,
    keep: float | Mapping[int, float] = 0.75,
    score: Score = "wanda",
    multiple: int = 64,
    least: float = 0.0,
    compensate: bool = False,
    ridge: float = RIDGE,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Removes hidden channels from the feed-forwards of the layers that the program visits.

        small, report = deepen.narrow(ck, deepen.activations(ck, text), keep=0.75)

    Args:
        ck: what to change.
        activations: from `deepen.activations`, for this program; only `magnitude` without compensation needs none.
        keep: the share of channels that stay, or the share for each layer; layers not named stay whole.
        score: `wanda`, `magnitude`, `energy` or `taylor`.
        multiple: the width that stays is a multiple of this number.
        least: the share of channels that stay for having the lowest scores (LoRAP: 0.01).
        compensate: fit what stays to what the whole feed-forward wrote; needs `deepen.activations(products=True)`.
        ridge: of the compensation, relative to the mean square of a hidden value.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: a layer that does not exist.
        UsageError: a share, score, multiple or ridge out of range, or activations that lack what is needed.
        FamilyError: feed-forwards that are not out(act(in x)) or down(act(gate x) * up x).
        CheckpointError: tensors whose values are codes.
    """
    found, _ = tower_key(ck, tower)
    _require(score, multiple, least, ridge)
    shares = _shares(ck, found, keep)
    if activations is None and (score != "magnitude" or compensate):
        what = "compensation" if compensate else f"the score {score}"
        raise UsageError(f"narrow: {what} needs activations; give deepen.activations(ck, text)")
    if activations is not None:
        activations.require(ck, found.name, "narrow")
    layers: dict[int, dict[str, Recipe]] = {}
    widths, shapes = {}, feed_forwards(ck, found, shares)
    for layer, share in shares.items():
        shape = shapes[layer]
        width = _width(shape.width, share, multiple)
        if width == shape.width:
            continue
        scores = channel_scores(ck, found, layer, shape, score, activations)
        kept = kept_channels(scores, width, least)
        gram, mean = _moments(activations, layer) if compensate else (None, None)
        layers[layer] = _sliced(ck, found, layer, shape, kept, gram, mean, ridge)
        widths[layer] = width
    made = with_width(ck, with_tensors(ck, found, layers), found, widths)
    before = sum(shape.width for shape in shapes.values())
    after = sum(widths.get(layer, shape.width) for layer, shape in shapes.items())
    return made, report(
        ck, made, found.name, "narrow",
        f"kept {after} of {before} feed-forward channels in {len(shapes)} layers by {score}"
        + (", compensated by least squares" if compensate else ""),
        folded=tuple(f"{ck.disk[found.name].prefix}.{layer}.{name}" for layer, each in layers.items() for name in each),
        figures={"kept": after / before},
    )  # fmt: skip


def _require(score: str, multiple: int, least: float, ridge: float) -> None:
    if score not in SCORES:
        raise UsageError(f"narrow: no score {score!r}{nearest(score, SCORES)}; expected one of {', '.join(SCORES)}")
    if multiple < 1:
        raise UsageError(f"narrow: a width is a multiple of 1 or more, got {multiple}")
    if not 0 <= least < 1:
        raise UsageError(f"narrow: the share of least channels is from 0 to below 1, got {least}")
    if ridge < 0:
        raise UsageError(f"narrow: the ridge is 0 or more, got {ridge}")


def _shares(ck: Checkpoint, tower: Tower, keep: float | Mapping[int, float]) -> dict[int, float]:
    """The share that each visited layer keeps."""
    visited = sorted({key.layer for key in ck.plan(tower.name).keys})
    if isinstance(keep, Mapping):
        require_layers(ck, tower, keep)
        if unseen := sorted(keep.keys() - set(visited)):
            raise UsageError(f"narrow: layer {unseen[0]} is not visited in `{ck.program}`")
    shares = {layer: keep.get(layer, 1.0) if isinstance(keep, Mapping) else keep for layer in visited}
    for layer, share in shares.items():
        if not 0 < share <= 1:
            raise UsageError(f"narrow: layer {layer} would keep a share of {share}; expected above 0, at most 1")
    return shares


def _width(width: int, share: float, multiple: int) -> int:
    """The multiple nearest to a share of a width; the whole width for a share of 1."""
    if share == 1:
        return width
    if multiple > width:
        raise UsageError(f"narrow: a multiple of {multiple} does not fit a width of {width}; choose a smaller one")
    return min(width, max(1, round(share * width / multiple)) * multiple)


def feed_forwards(ck: Checkpoint, tower: Tower, layers: Iterable[int]) -> dict[int, FeedForward]:
    """The matrices of the feed-forwards of these layers.

    Raises:
        FamilyError: a feed-forward is not out(act(in x)) or down(act(gate x) * up x), or no part of its layer.
    """
    from deepen.checkpoint.widths import bank_modules, feed_forward

    if tower.parts.kind == "whole":
        raise FamilyError(f"{ck.where}: the feed-forwards of {ck.family.model_type} are no part: {tower.parts.reason}")
    modules = bank_modules(ck, tower)
    shapes = {layer: feed_forward(modules[layer], tower.parts, f"{ck.where}: layer {layer}") for layer in layers}
    for layer, shape in shapes.items():
        owned = layer_tensors(ck, tower, layer)
        if missing := [name for name in (*shape.inputs, shape.output) if f"{name}.weight" not in owned]:
            raise FamilyError(f"{ck.where}: the files hold no {missing[0]}.weight of layer {layer} under that name")
    return shapes


def _moments(activations: Activations | None, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    if activations is None or layer not in activations.grams:
        raise UsageError(
            f"narrow: compensation needs the products of the hidden values of layer {layer}; read them with "
            "deepen.activations(ck, text, products=True)"
        )
    return activations.grams[layer], activations.means[layer]


def channel_scores(
    ck: Checkpoint, tower: Tower, layer: int, shape: FeedForward, score: str, activations: Activations | None
) -> torch.Tensor:
    """A score for each hidden channel of a layer, [m] in fp64; higher is worth more.

    Raises:
        UsageError: the activations lack what the score needs.
    """
    import torch

    if score == "taylor":
        assert activations is not None
        if layer not in activations.effects:
            raise UsageError(
                f"narrow: the score taylor needs gradients of layer {layer}; read them with "
                "deepen.activations(ck, text, gradients=True)"
            )
        return activations.effects[layer]
    weights = {name: _by_channel(ck, tower, layer, shape, name) for name in (*shape.inputs, shape.output)}
    if score == "energy":
        assert activations is not None
        activations.square(layer, shape.output)
        # What was always zero counts as zero here: its energy is no factor of other weights.
        return activations.squares[layer][shape.output] * weights[shape.output].square().sum(1)
    total = torch.zeros(shape.width, dtype=torch.float64)
    for name, rows in weights.items():
        if score == "magnitude":
            total += rows.norm(dim=1)
            continue
        assert activations is not None
        root = activations.square(layer, name).sqrt()
        total += rows.norm(dim=1) * root if name == shape.output else (rows * root).norm(dim=1)
    return total


def _by_channel(ck: Checkpoint, tower: Tower, layer: int, shape: FeedForward, name: str) -> torch.Tensor:
    """A matrix with one row a hidden channel, [m, d] in fp64."""
    full = layer_tensors(ck, tower, layer)[f"{name}.weight"]
    weight = Computed(TensorInfo("F64", ck.source.infos[full].shape), (Copy(full, ck.source.infos[full]),),
                      lambda each: each, "ranking channels").compute(ck.source)  # fmt: skip
    return weight if _axis(ck, tower, layer, shape, name) == 0 else weight.T


def _axis(ck: Checkpoint, tower: Tower, layer: int, shape: FeedForward, name: str) -> int:
    """The axis of a matrix that counts hidden channels."""
    from deepen.checkpoint.widths import bank_modules, output_axis

    axis = output_axis(bank_modules(ck, tower)[layer].get_submodule(name))
    return 1 - axis if name == shape.output else axis


def kept_channels(scores: torch.Tensor, width: int, least: float = 0.0) -> torch.Tensor:
    """The channels that stay, ascending: the highest scores, and a share `least` of all for the lowest ones."""
    import torch

    order = scores.argsort(stable=True)
    low = min(int(least * len(scores)), width)
    return torch.cat([order[:low], order[len(order) - (width - low) :]]).sort().values


def _sliced(
    ck: Checkpoint,
    tower: Tower,
    layer: int,
    shape: FeedForward,
    kept: torch.Tensor,
    gram: torch.Tensor | None,
    mean: torch.Tensor | None,
    ridge: float,
) -> dict[str, Recipe]:
    """The tensors of a narrower feed-forward."""
    what = f"narrowing the feed-forward of layer {layer}"
    tensors = picked(ck, tower, layer, shape, kept, what)
    if gram is None or mean is None:
        return tensors
    owned, infos = layer_tensors(ck, tower, layer), ck.source.infos
    copies = {name: Copy(owned[name], infos[owned[name]]) for name in owned}
    inner, bias = f"{shape.output}.weight", copies.get(f"{shape.output}.bias")
    axis = _axis(ck, tower, layer, shape, shape.output)
    fit = Fit(gram, mean if bias is not None else None, kept, ridge)

    def weight(old: Any) -> Any:
        rows = fit.weight(old if axis == 1 else old.T)
        return rows if axis == 1 else rows.T

    tensors[inner] = Computed(TensorInfo(copies[inner].dtype, tensors[inner].shape), (copies[inner],), weight, what)
    if bias is not None:
        shift = lambda old, matrix: old + fit.shift(matrix if axis == 1 else matrix.T)  # noqa: E731
        tensors[f"{shape.output}.bias"] = Computed(bias.info, (bias, copies[inner]), shift, what)
    return tensors


def picked(
    ck: Checkpoint, tower: Tower, layer: int, shape: FeedForward, channels: torch.Tensor, what: str
) -> dict[str, Recipe]:
    """The tensors of a feed-forward with these of its hidden channels, in this order."""
    owned, infos = layer_tensors(ck, tower, layer), ck.source.infos
    tensors: dict[str, Recipe] = {}
    for name in (*shape.inputs, shape.output):
        axis = _axis(ck, tower, layer, shape, name)
        leaves = ("weight",) if name == shape.output else ("weight", "bias")
        for inner, at in ((f"{name}.{leaf}", axis if leaf == "weight" else 0) for leaf in leaves):
            if inner in owned:
                old = Copy(owned[inner], infos[owned[inner]])
                size = tuple(len(channels) if i == at else n for i, n in enumerate(old.shape))
                pick = lambda whole, at=at: whole.index_select(at, channels)  # noqa: E731
                tensors[inner] = Computed(TensorInfo(old.dtype, size), (old,), pick, what)
    return tensors


class Fit:
    """The least-squares fit of the kept channels to what all of them wrote.

    Args:
        gram: mean of a a', [m, m].
        mean: mean of a, [m], where a bias can take up a shift; else None.
        kept: the channels that stay.
        ridge: relative to the mean square of a hidden value that stays.
    """

    def __init__(self, gram: torch.Tensor, mean: torch.Tensor | None, kept: torch.Tensor, ridge: float) -> None:
        import torch

        stays = torch.zeros(len(gram), dtype=torch.bool)
        stays[kept] = True
        self.kept, self.gone = kept, (~stays).nonzero().flatten()
        self.moments = gram if mean is None else gram - torch.outer(mean, mean)
        self.mean, self.ridge = mean, ridge

    def weight(self, matrix: torch.Tensor) -> torch.Tensor:
        """W', [d, m'], of a matrix [d, m]."""
        return matrix[:, self.kept] + self._moved(matrix)

    def shift(self, matrix: torch.Tensor) -> torch.Tensor:
        """What the bias takes up, [d]."""
        assert self.mean is not None
        mean = self.mean.to(matrix.dtype)
        return matrix[:, self.gone] @ mean[self.gone] - self._moved(matrix) @ mean[self.kept]

    def error(self, matrix: torch.Tensor, fitted: torch.Tensor) -> float:
        """Mean square of what `fitted` [d, m'] writes away from W a, the bias shifted for the best."""
        apart = matrix.clone()
        apart[:, self.kept] -= fitted
        return (apart @ self.moments.to(matrix.dtype) * apart).sum().item()

    def _moved(self, matrix: torch.Tensor) -> torch.Tensor:
        import torch

        own = self.moments[self.kept][:, self.kept]
        values, vectors = torch.linalg.eigh(own)
        damped = values.clamp_min(0) + self.ridge * own.diagonal().mean()
        silent = damped <= len(values) * torch.finfo(torch.float64).eps * damped.max()
        inverse = torch.where(silent, 0.0, 1 / torch.where(silent, 1.0, damped))
        cross = matrix[:, self.gone].double() @ self.moments[self.gone][:, self.kept]
        return ((cross @ vectors * inverse) @ vectors.T).to(matrix.dtype)
