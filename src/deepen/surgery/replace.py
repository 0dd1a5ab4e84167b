r"""Replace a block of layers by one linear map, folded into the feed-forward before it.

    ... p [first ... last] last+1 ...   ->   ... p' last+1 ...

    stream after p:  y + M        M: what the feed-forward of p writes, one row a token
    block adds:      D            so that the stream after the block is y + M + D
    p' writes        M (I + A)    A = argmin |M A - D|^2 + r |A|^2 = (M'M + r I)^-1 M'D
    fold             W_out' = (I + A)' W_out,   b_out' = (I + A)' b_out

The map acts on what the feed-forward writes and not on the stream, so it costs nothing: it disappears in the output
matrix. The ridge r draws it to A = 0, which is plain dropping, so the calibration error is never above that of
dropping. Only M'M, M'D and |D|^2 are needed, in fp64, whatever the number of tokens.

Where D is linear in M the replaced model is the original one. Cost: one eigendecomposition of [d, d]; saves the block.

Shopkhoev et al., ReplaceMe, arXiv:2505.02819 (ridge towards A = 0 instead of I + A = 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import Computed, layer_tensors, with_layer
from deepen.checkpoint.recipes import Copy, Recipe, info
from deepen.errors import CheckpointError, DataError, FamilyError, ProgramError, UsageError
from deepen.program.tree import Ref
from deepen.registry import method
from deepen.surgery.place import joined, require_layers, stretch, tower_key
from deepen.surgery.report import Report, report

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower

# The ridge, relative to the mean square of what the feed-forward writes.
RIDGE = 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The normal equations of a block: sums over tokens, in fp64.

    Attributes:
        program: the program they were read under.
        first: the first layer of the block.
        last: the last layer of the block.
        gram: M'M, [d, d].
        cross: M'D, [d, d].
        energy: |D|^2, the error of plain dropping.
        tokens: rows of M and D.
    """

    program: str
    first: int
    last: int
    gram: torch.Tensor
    cross: torch.Tensor
    energy: float
    tokens: int

    def solve(self, ridge: float = RIDGE) -> torch.Tensor:
        """The map A, [d, d]; of several minima the smallest.

        Args:
            ridge: relative to the mean square of a value of M; 0 for plain least squares.

        Raises:
            UsageError: a negative ridge.
            DataError: sums that are not finite.
        """
        import torch

        if ridge < 0:
            raise UsageError(f"the ridge is 0 or more, got {ridge}")
        if not bool(torch.isfinite(self.gram).all() and torch.isfinite(self.cross).all()):
            raise DataError("the streams of the calibration are not finite; compute in float32")
        values, vectors = torch.linalg.eigh(self.gram)
        damped = values.clamp_min(0) + ridge * self.gram.diagonal().mean()
        # Directions in which the feed-forward writes nothing say nothing about the map.
        silent = damped <= len(values) * torch.finfo(torch.float64).eps * damped.max()
        inverse = torch.where(silent, 0.0, 1 / torch.where(silent, 1.0, damped))
        return vectors @ (inverse[:, None] * (vectors.T @ self.cross))

    def error(self, found: torch.Tensor) -> float:
        """|M A - D|^2 as a share of |D|^2: 1 for plain dropping, 0 for an exact replacement."""
        if self.energy == 0:
            return 0.0
        moved = (found * (self.gram @ found)).sum() - 2 * (found * self.cross).sum()
        return max(0.0, 1.0 + moved.item() / self.energy)


@method(
    "replace-block",
    family="surgery",
    source="arXiv:2505.02819",
    title="ReplaceMe: Network Simplification via Depth Pruning and Transformer Block Linearization",
    mechanism="a block becomes a linear map by least squares, folded into the feed-forward before it",
    cost="one calibration pass; saves all that the block costs",
)
def replace_block(
    ck: Checkpoint, first: int, last: int, calibration: Calibration, *, ridge: float = RIDGE, tower: str = ""
) -> tuple[Checkpoint, Report]:
    """Drops the layers from `first` to `last`, both included, and lets the layer before them do their work.

        small, report = deepen.replace_block(ck, 20, 24, deepen.calibrate(ck, text, 20, 24))

    Args:
        ck: what to change.
        first: the first layer of the block.
        last: the last layer of the block.
        calibration: from `deepen.calibrate`, for this block and program.
        ridge: relative to the mean square of what the feed-forward writes.
        tower: the tower; the empty name means the default one.

    Raises:
        ProgramError: the block is not visited once, in a row and outside of loops and groups, after another layer.
        UsageError: a calibration of another block or program, or a negative ridge.
        FamilyError: the layer before the block has no feed-forward of its own with one output matrix.
        DataError: a calibration that is not finite.
    """
    found, _ = tower_key(ck, tower)
    if (calibration.first, calibration.last, calibration.program) != (first, last, str(ck.program)):
        raise UsageError(
            f"replace_block: the calibration is of layers {calibration.first} to {calibration.last} in "
            f"`{calibration.program}`, not of layers {first} to {last} in `{ck.program}`; calibrate again"
        )
    layer = layer_before(ck, tower, first, last)
    before, _, after = stretch(ck, tower, layer, last, "replace_block")
    name, axis = output_name(ck, found, layer)
    width = ck.source.infos[layer_tensors(ck, found, layer)[f"{name}.weight"]].shape[axis]
    if calibration.gram.shape != (width, width) or calibration.cross.shape != (width, width):
        raise UsageError(
            f"replace_block: the calibration is of streams of {calibration.gram.shape[0]} values, the model has {width}"
        )
    found_map = calibration.solve(ridge)
    error = calibration.error(found_map)
    tensors: dict[str, Recipe] = {
        inner: Copy(full, ck.source.infos[full]) for inner, full in layer_tensors(ck, found, layer).items()
    }
    folded = [inner for inner in (f"{name}.weight", f"{name}.bias") if inner in tensors]
    for inner in folded:
        tensors[inner] = _folded(tensors[inner], found_map, axis)
    number = ck.depth[found.name]
    made = joined(with_layer(ck, found, layer, tensors), tower, before, str(number), after)
    note = (
        f"replaced layers {first} to {last} by a linear map in layer {number}, made of layer {layer}; "
        f"{error:.1%} of the square of what they added is left on the calibration tokens"
    )
    prefix = made.disk[found.name].prefix
    return made, report(
        ck, made, found.name, "replace-block", note,
        merged={number: (layer,)},
        folded=tuple(f"{prefix}.{number}.{inner}" for inner in folded),
        figures={"error": error, "tokens": calibration.tokens},
    )  # fmt: skip


def _folded(recipe: Recipe, found: torch.Tensor, axis: int) -> Recipe:
    """An output matrix, [out, in] or [in, out], or bias [out], whose output is multiplied by I + A."""

    def fold(tensor: torch.Tensor) -> torch.Tensor:
        move = found.to(tensor.dtype)
        return tensor + (move.T @ tensor if axis == 0 else tensor @ move)

    axis = 0 if len(recipe.shape) == 1 else axis
    return Computed(info(recipe), (recipe,), fold, "folding the linear map into the output matrix")


def layer_before(ck: Checkpoint, tower: str, first: int, last: int) -> int:
    """The layer whose visit stands right before a block.

    Raises:
        ProgramError: the block is not visited once, in a row and outside of loops and groups, after another layer.
        FamilyError: the family's layers have no feed-forward whose output goes to the stream as it is.
    """
    found, _ = tower_key(ck, tower)
    require_layers(ck, found, (first, last))
    if found.parts.kind not in ("serial", "parallel") or found.parts.post_norm:
        reason = found.parts.reason or "it has no feed-forward part that writes to the stream as it is"
        raise FamilyError(f"replace_block: a layer of {ck.family.model_type} cannot take up a linear map: {reason}")
    before, _, _ = stretch(ck, tower, first, last, "replace_block")
    own = before[-1] if before else None
    if not isinstance(own, Ref) or own.copy or own.attrs or own.parts not in (None, "af", "f"):
        raise ProgramError(
            f"replace_block: no layer with a feed-forward is visited right before layer {first} in `{ck.program}`; "
            "start the block later"
        )
    return own.first.value


def output_name(ck: Checkpoint, tower: Tower, layer: int) -> tuple[str, int]:
    """The output matrix of a layer's feed-forward, and which axis of its weight counts what it gives.

    Raises:
        FamilyError: there is not exactly one.
        CheckpointError: the files name it otherwise.
    """
    from deepen.checkpoint.widths import bank_modules, output_axis, output_matrix

    module = bank_modules(ck, tower)[layer]
    name = output_matrix(module, tower.parts, "f", ck.where)
    if f"{name}.weight" not in layer_tensors(ck, tower, layer):
        raise CheckpointError(f"{ck.where}: the files hold no tensor {name}.weight of layer {layer} under that name")
    return name, output_axis(module.get_submodule(name))
