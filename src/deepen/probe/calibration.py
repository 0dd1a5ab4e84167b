"""What `replace_block` needs to know of a block: what the layer before it writes, and what the block adds.

    M   written by the feed-forward of the layer before the block, one row a token
    D   stream after the block minus stream before it

Summed over the tokens of a text as M'M, M'D and |D|^2 in fp64, in one pass without the head; nothing is kept per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepen.errors import FamilyError
from deepen.probe.scores.reading import exact, open_reading, require_finite, watching
from deepen.surgery.place import tower_key
from deepen.surgery.replace import Calibration, layer_before, output_name

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint

# How far, relative to it, what a layer adds may lie from the sum of what its parts write; rounding of the stream
# comes on top.
ROUNDING = 0.01


def calibrate(
    ck: Checkpoint,
    text: str,
    first: int,
    last: int,
    *,
    tower: str = "",
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
) -> Calibration:
    """Reads a text and sums the normal equations of the block from layer `first` to layer `last`, both included.

    Args:
        ck: the checkpoint with the block.
        text: what to read; more tokens than the width of the stream, or the map fits the text alone.
        first: the first layer of the block.
        last: the last layer of the block.
        tower: the tower; the empty name means the default one.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files. The block's share of a large stream is lost in
            bfloat16; float32 keeps it.

    Raises:
        ProgramError: the block is not visited once, in a row and outside of loops and groups, after another layer.
        FamilyError: the layer before has no feed-forward whose output goes to the stream as it is.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or the stream is not finite.
    """
    import torch

    before = layer_before(ck, tower, first, last)
    found, _ = tower_key(ck, tower)
    output_name(ck, found, before)
    visited = [visit.key.layer for visit in ck.plan(found.name).visits]
    start, end = visited.index(first), visited.index(last)
    reading = open_reading(
        ck, text, tower=tower, context=context, tokens=tokens, batch=batch, device=device, dtype=dtype
    )
    sums = _Sums()

    def watch(visit: int, stream: torch.Tensor, after: torch.Tensor, written: dict[str, torch.Tensor]) -> None:
        if visit == start - 1:
            _require_plain_sum(ck, before, stream, after, written)
            sums.written = exact(written["f"]).double().flatten(0, -2)
        if visit == start:
            sums.entered = exact(stream).double().flatten(0, -2)
        if visit == end:
            sums.add(exact(after).double().flatten(0, -2))

    with torch.inference_mode(), watching(reading.visits, watch, parts=True):
        for ids, _ in reading.groups():
            reading.run(ids)
    assert sums.gram is not None
    assert sums.cross is not None
    return Calibration(
        program=str(ck.program),
        first=first,
        last=last,
        gram=sums.gram.cpu().clone(),
        cross=sums.cross.cpu().clone(),
        energy=sums.energy,
        tokens=sums.tokens,
    )


class _Sums:
    """M'M, M'D and |D|^2 so far, and the streams of the pass that is under way."""

    def __init__(self) -> None:
        self.written: torch.Tensor | None = None
        self.entered: torch.Tensor | None = None
        self.gram: torch.Tensor | None = None
        self.cross: torch.Tensor | None = None
        self.energy, self.tokens = 0.0, 0

    def add(self, after: torch.Tensor) -> None:
        """Takes the stream after the block, [n, d]."""
        assert self.written is not None
        assert self.entered is not None
        added = after - self.entered
        require_finite(added)
        gram, cross = self.written.T @ self.written, self.written.T @ added
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross
        self.energy += added.square().sum().item()
        self.tokens += len(added)


def _require_plain_sum(
    ck: Checkpoint, layer: int, stream: torch.Tensor, after: torch.Tensor, written: dict[str, torch.Tensor]
) -> None:
    """Refuses a layer that changes what its parts write before it adds it to the stream."""
    import torch

    added = after.float() - stream.float()
    off = (added - sum(part.float() for part in written.values())).norm().item()
    if off > ROUNDING * added.norm().item() + torch.finfo(after.dtype).eps * after.float().norm().item():
        raise FamilyError(
            f"{ck.where}: layer {layer} adds what its feed-forward writes to the stream only after a norm or a factor, "
            "so no linear map can be folded into its output matrix"
        )
