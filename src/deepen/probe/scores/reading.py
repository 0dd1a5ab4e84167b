"""What every score reads: a loaded model, the visits of one tower, and a text in windows.

A score only watches, or it runs the model again with some visits answered from a pass before; the model itself is
never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepen.errors import DataError, FamilyError
from deepen.probe.windows import Window, batches, cut, require_context

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase
    from deepen.checkpoint.visit import VisitList

# Called for each visit of a pass: its number, the stream before and after, and what each part wrote, [b, t, d].
Watcher = Callable[[int, "torch.Tensor", "torch.Tensor", "dict[str, torch.Tensor]"], None]


@dataclass(kw_only=True)
class Reading:
    """A model and the text that scores read.

    Attributes:
        model: in eval mode.
        visits: the visits of the tower that is scored.
        tokenizer: of the model.
        windows: of the text; none is padded.
        batch: windows that are read at once.
        causal: whether the model has a causal head.
        step: called with the windows done.
        calls: forward calls made so far, each of one batch of windows.
    """

    model: PreTrainedModel
    visits: VisitList
    tokenizer: PreTrainedTokenizerBase
    windows: Sequence[Window]
    batch: int
    causal: bool
    step: Callable[[int], None] = lambda count: None
    calls: int = field(default=0, init=False)

    @property
    def depth(self) -> int:
        """The number of visits."""
        return len(self.visits.entries)

    @property
    def tokens(self) -> int:
        return sum(len(window.ids) for window in self.windows)

    def groups(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Token ids of each batch of windows, [b, t], and the place of the first token that the head predicts."""
        import torch

        for group in batches(self.windows, self.batch):
            ids = torch.tensor([window.ids for window in group], device=self.model.device)
            yield ids, max(1, group[0].start)

    def run(self, ids: torch.Tensor, *, head: bool = False, **options: Any) -> Any:
        """One forward call; without the head, which most scores do not need.

        Args:
            ids: [b, t].
            head: whether to go through the head of the model.
            options: passed on to the model.
        """
        self.calls += 1
        inputs: dict[str, Any] = {"input_ids": ids, **options}
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        elif self.model.can_generate():
            inputs["use_cache"] = False
        return (self.model if head else self.model.base_model)(**inputs)


def open_reading(
    ck: Checkpoint,
    text: str,
    *,
    tower: str,
    context: int,
    tokens: int | None,
    batch: int,
    device: str,
    dtype: Any,
    eager: bool = False,
) -> Reading:
    """Loads a checkpoint and cuts the text; see `deepen.score` for the arguments.

    Args:
        ck: what to score.
        text: what to read.
        tower: the tower whose visits are scored; the empty name means the default one.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.
        eager: compute attention in the way that shows its weights.

    Raises:
        FamilyError: no such tower, or the model does not read text.
        UsageError: context, tokens or batch that do not fit together or the model.
        DataError: the text is shorter than one window.
    """
    from deepen.checkpoint.visit import VisitList
    from deepen.probe.perplexity import is_causal

    name = ck.family.tower(tower).name
    tokenizer = ck.tokenizer()
    model = ck.load(dtype=dtype, device=device, attn_implementation="eager" if eager else None)
    if model.main_input_name != "input_ids":
        raise FamilyError(
            f"{type(model).__name__} takes {model.main_input_name}, and deepen scores layers of models that read text"
        )
    require_context(model.config, context)
    causal = is_causal(model)
    windows = cut(tokenizer, text, context=context, tokens=tokens, suffix=not causal)
    visits = next(m for m in model.modules() if isinstance(m, VisitList) and m.tower.name == name)
    return Reading(model=model, visits=visits, tokenizer=tokenizer, windows=windows, batch=batch, causal=causal)


@contextmanager
def watching(visits: VisitList, watcher: Watcher, parts: bool = False) -> Iterator[None]:
    """Calls `watcher` after each visit of the passes run inside; no output changes.

    Args:
        visits: the tower to watch.
        watcher: see `Watcher`; it must not keep or change the tensors it gets.
        parts: whether to watch the parts too; only where the family's parts are separable modules.
    """
    from deepen.checkpoint.views import part_modules

    handles: list[Any] = []
    written: dict[str, torch.Tensor] = {}
    inputs: list[torch.Tensor] = []
    at = 0

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written.clear()
        inputs[:] = [args[0] if args else kwargs["hidden_states"]]

    def end(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        nonlocal at
        watcher(at % len(visits.entries), inputs.pop(), stream_of(out), written)
        at += 1

    def wrote(letter: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            written[letter] = stream_of(out)

        return keep

    try:
        for layer in visits._modules.values():
            assert layer is not None
            handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(end))
            for letter in visits.tower.parts.letters if parts else "":
                names = part_modules(layer, visits.tower.parts, letter)
                handles.append(layer.get_submodule(names[-1]).register_forward_hook(wrote(letter)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def stream_of(out: Any) -> torch.Tensor:
    """The stream in what a layer returned: the first of several values, or the only one."""
    return out[0] if isinstance(out, (tuple, list)) else out


def exact(values: torch.Tensor) -> torch.Tensor:
    """The values where fp64 can be computed: Apple's GPU has none."""
    return values.cpu() if values.device.type == "mps" else values


def require_finite(values: torch.Tensor) -> None:
    """Refuses what overflowed: streams, logits or gradients.

    Raises:
        DataError: a value is infinite or not a number.
    """
    if not bool(values.isfinite().all()):
        raise DataError("what the model computes is not finite on this text; compute in --dtype float32")
