"""A text as windows of tokens, with the bytes that each token stands for.

    text tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...
    windows       [s t0 t1 t2 e] [s t3 t4 t5 e] ...     s, e: what the tokenizer itself puts around a text, if anything

Windows do not overlap. The last one may be shorter; it is left out when it holds fewer than two tokens of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from deepen.errors import DataError, UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedTokenizerBase

# Characters first read for each token wanted, and tokens beyond those wanted that the cut of the text may change.
CHARACTERS_A_TOKEN, SLACK = 8, 64


@dataclass(frozen=True, slots=True)
class Window:
    """One window.

    Attributes:
        ids: tokens, those that the tokenizer puts around the text included.
        start: where the text begins in `ids`.
        edges: for each token of text, how many bytes of the whole text end with it; one more entry in front.
    """

    ids: tuple[int, ...]
    start: int
    edges: tuple[int, ...]


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text: BOS, CLS, SEP ..."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def encode(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int | None) -> tuple[list[int], list[int]]:
    """Tokens of the text and its edges in bytes, of the first `tokens` only if that is given.

    The text is tokenised in one piece. Of a long text only as much is read as the tokens wanted need, and a little
    more, so that the cut changes none of them.
    """
    if tokens is not None:
        characters = CHARACTERS_A_TOKEN * (tokens + SLACK)
        while characters < len(text):
            ids, edges = _encode(tokenizer, text[:characters])
            if len(ids) >= tokens + SLACK:
                return ids[:tokens], edges[: tokens + 1]
            characters *= 2
    ids, edges = _encode(tokenizer, text)
    return (ids, edges) if tokens is None else (ids[:tokens], edges[: tokens + 1])


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not say which characters a token covers; save the tokenizer with a "
            "tokenizer.json, which transformers can do for most"
        )
    # verbose: transformers would warn that the whole text is longer than the model's context
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    edges = [0]
    characters = 0
    for _, end in found["offset_mapping"]:
        # What lies between two tokens counts with the later one; tokens that split a character, with the first.
        extra = text[characters:end] if end > characters else ""
        characters = max(characters, end)
        edges.append(edges[-1] + len(extra.encode()))
    return found["input_ids"], edges


def cut(
    tokenizer: PreTrainedTokenizerBase, text: str, *, context: int, tokens: int | None, suffix: bool = False
) -> list[Window]:
    """The windows of a text.

    Args:
        tokenizer: of the model.
        text: what to read.
        context: tokens of a window, those that the tokenizer adds included.
        tokens: tokens of text to read; None reads all.
        suffix: whether windows also end with what the tokenizer puts after a text.

    Raises:
        UsageError: a context or number of tokens that leaves no whole window.
        DataError: the text is shorter than one window.
    """
    before, after = frame(tokenizer)
    if not suffix:
        after = []
    room = context - len(before) - len(after)
    if room < 2:
        raise UsageError(f"a context of {context} tokens leaves {room} for text; expected at least 2: raise --context")
    if tokens is not None and tokens < room:
        raise UsageError(f"{tokens} tokens are fewer than one window of {context}; raise --tokens or lower --context")
    ids, edges = encode(tokenizer, text, tokens)
    if len(ids) < room:
        raise DataError(
            f"the text has {len(ids)} tokens, fewer than one window of {context}; give more text or lower --context"
        )
    return [
        Window((*before, *ids[at : at + room], *after), len(before), tuple(edges[at : at + room + 1]))
        for at in range(0, len(ids), room)
        if len(ids) - at >= 2
    ]


def batches(windows: Sequence[Window], batch: int) -> Iterator[list[Window]]:
    """Up to `batch` windows of one length at a time, so that nothing is padded.

    Raises:
        UsageError: a batch of less than one.
    """
    if batch < 1:
        raise UsageError(f"a batch has at least 1 window, got {batch}")
    for _, group in groupby(windows, key=lambda window: len(window.ids)):
        same = list(group)
        yield from (same[at : at + batch] for at in range(0, len(same), batch))


def require_context(config: Any, context: int) -> None:
    """Refuses more tokens than the model has positions.

    Raises:
        UsageError: the context is longer.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < context:
        raise UsageError(f"{context} tokens are more than the {most} positions of the model; ask for fewer")
