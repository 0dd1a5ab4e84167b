"""Reads a text and keeps what every feed-forward reads, for `deepen.moefy` and `deepen.factor_llm`.

One forward call a batch. It keeps 4 d bytes for each token and layer: 283 MB for 4096 tokens of SmolLM2-135M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepen.errors import FamilyError
from deepen.probe.scores.reading import open_reading, require_finite
from deepen.surgery.feed_inputs import FeedInputs

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint


def feed_inputs(
    ck: Checkpoint,
    text: str,
    *,
    tower: str = "",
    context: int = 512,
    tokens: int | None = 4096,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
) -> FeedInputs:
    """What each feed-forward of a tower reads on a text; layers whose feed-forward is of another shape are left out.

    Args:
        ck: the checkpoint.
        text: what to read.
        tower: the tower; the empty name means the default one.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.

    Raises:
        FamilyError: no such tower, or none of its feed-forwards is out(act(in x)) or down(act(gate x) * up x).
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window, or values are not finite.
    """
    import torch

    from deepen.checkpoint.widths import feed_forward

    found = ck.family.tower(tower)
    reading = open_reading(
        ck, text, tower=tower, context=context, tokens=tokens, batch=batch, device=device, dtype=dtype
    )
    keys = ck.plan(found.name).keys
    read: dict[int, list[torch.Tensor]] = {}
    handles: list[Any] = []
    reason = ""
    try:
        for child, layer in reading.visits._modules.items():
            assert layer is not None
            number = keys[int(child)].layer
            try:
                shape = feed_forward(layer, found.parts, f"{ck.where}: layer {number}")
            except FamilyError as error:
                reason = str(error)
                continue
            keep = lambda module, args, number=number: read.setdefault(number, []).append(  # noqa: E731
                args[0].detach().flatten(0, -2).float().cpu()
            )
            handles.append(layer.get_submodule(shape.module).register_forward_pre_hook(keep))
        if not handles:
            raise FamilyError(reason)
        with torch.no_grad():
            for ids, _ in reading.groups():
                reading.run(ids)
    finally:
        for handle in handles:
            handle.remove()
    reads = {layer: torch.cat(pieces) for layer, pieces in read.items()}
    for each in reads.values():
        require_finite(each)
    return FeedInputs(program=str(ck.program), tower=found.name, reads=reads)
