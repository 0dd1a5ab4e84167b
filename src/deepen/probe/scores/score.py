"""`deepen.score`: several scores of every visit side by side.

Scores that only watch the stream are fed together by one pass without the head. Each of the others makes passes of its
own; `deepen methods --family score` states how many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepen.errors import UsageError, nearest
from deepen.probe.scarce import lowering
from deepen.probe.scores.base import PassScore, Result, Row, Scores, WatchScore
from deepen.probe.scores.collect import collect
from deepen.probe.scores.reading import Reading, open_reading
from deepen.registry import methods

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# What is read when no score is named: those that share one pass, cheapest first.
TOGETHER = ("block_influence", "angular", "contribution", "geometry", "effective_rank", "cka")
NO_HEAD = "skipped: it needs a causal head, and {model} has none"


def score(
    ck: Checkpoint,
    *names: str,
    text: str,
    tower: str = "",
    context: int = 512,
    tokens: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores every visit of a checkpoint's program on a text.

    Args:
        ck: what to score.
        names: scores, as `deepen methods --family score` lists them; those that share one pass when none is given.
        text: what to read.
        tower: the tower whose visits are scored; the empty name means the default one.
        context: tokens of a window.
        tokens: tokens of the text to read; None reads all.
        batch: windows that are read at once.
        device: where the weights go.
        dtype: what they are computed in; None keeps that of the files.
        progress: called with the windows done since its last call, and all there are, over all scores.

    Raises:
        FamilyError: no such tower, or the model does not read text.
        UsageError: an unknown score; context, tokens or batch that do not fit together, the model or the memory.
        DataError: the text is shorter than one window, or the stream is not finite.

    Example:
        >>> import deepen
        >>> ck = deepen.open("model")                                                        # doctest: +SKIP
        >>> print(deepen.score(ck, "angular", "removal", text=text, tokens=4096).table())     # doctest: +SKIP
    """
    chosen = choose(names or TOGETHER)
    ck.require_executable()
    ck.require_layers()
    eager = any(issubclass(kind, PassScore) and kind.needs_attention for kind in chosen.values())
    reading = open_reading(
        ck, text, tower=tower, context=context, tokens=tokens, batch=batch, device=device, dtype=dtype, eager=eager
    )
    with lowering(batch=batch, context=context):
        results, calls, seconds = score_reading(reading, chosen, progress)
    letters = reading.visits.tower.parts.letters
    return Scores(
        program=str(ck.program),
        rows=tuple(
            Row(visit=at, layer=f"{visit.key}" if visit.parts == letters else f"{visit.key}.{visit.parts}")
            for at, visit in enumerate(entry.visit for entry in reading.visits.entries)
        ),
        columns={column.name: column for result in results.values() for column in result.columns},
        matrices={matrix.name: matrix for result in results.values() for matrix in result.matrices},
        notes={name: result.note for name, result in results.items() if result.note},
        tokens=reading.tokens,
        windows=len(reading.windows),
        context=context,
        calls=calls,
        seconds=seconds,
    )


def choose(names: Sequence[str]) -> dict[str, type[WatchScore] | type[PassScore]]:
    """The classes of the scores of these names, in their order.

    Raises:
        UsageError: an unknown score; the nearest name is given.
    """
    known = {found.name: found.implementation for found in methods("score")}
    for name in names:
        if name not in known:
            raise UsageError(f"no score {name!r}{nearest(name, known)}; there are {', '.join(sorted(known))}")
    return {name: known[name] for name in names}  # pyright: ignore[reportReturnType]


def score_reading(
    reading: Reading,
    chosen: Mapping[str, type[WatchScore] | type[PassScore]],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Result], dict[str, int], dict[str, float]]:
    """The result, forward calls and seconds of each score; those that watch are fed together.

    Args:
        reading: what to read.
        chosen: classes of scores by name.
        progress: see `score`.
    """
    watched = {name: kind(reading.depth) for name, kind in chosen.items() if issubclass(kind, WatchScore)}
    passes = {name: kind() for name, kind in chosen.items() if issubclass(kind, PassScore)}
    skipped = {name for name, each in passes.items() if each.needs_head and not reading.causal}
    rounds = bool(watched) + len(passes) - len(skipped)
    if progress is not None:
        reading.step = lambda count: progress(count, rounds * len(reading.windows))
    results: dict[str, Result] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}

    def measured(names: Sequence[str], work: Callable[[], dict[str, Result]]) -> None:
        made, started = reading.calls, time.perf_counter()
        results.update(work())
        spent = time.perf_counter() - started
        for name in names:
            calls[name], seconds[name] = reading.calls - made, spent

    if watched:
        measured(list(watched), lambda: _watch(reading, watched))
    for name, each in passes.items():
        if name in skipped:
            results[name] = Result(note=NO_HEAD.format(model=type(reading.model).__name__))
        else:
            measured([name], lambda name=name, each=each: {name: each.run(reading)})
    return {name: results[name] for name in chosen}, calls, seconds


def _watch(reading: Reading, watched: Mapping[str, WatchScore]) -> dict[str, Result]:
    note = collect(reading, list(watched.values()))
    results = {}
    for name, each in watched.items():
        found = each.result()
        results[name] = Result(found.columns, found.matrices, found.note or (note if each.parts else ""))
    return results
