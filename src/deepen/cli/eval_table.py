"""What `deepen eval` found for each program, and the tables of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepen.cli.output import amount, size, table

if TYPE_CHECKING:
    from deepen.probe.distance import Distance
    from deepen.probe.interval import Difference
    from deepen.probe.perplexity import Evaluation
    from deepen.probe.speed import Speed
    from deepen.probe.tasks import TaskScore
    from deepen.probe.trie import Visits


@dataclass
class Row:
    """One program.

    Attributes:
        program: in its normal form.
        found: on the text.
        shared: whether it ran together with others, so that its time is not its own.
        difference: from the first program, in nats a token.
        speed: as it generates.
        tasks: its scores on tasks.
    """

    program: str
    found: Evaluation | Distance | None = None
    shared: bool = False
    difference: Difference | None = None
    speed: Speed | None = None
    tasks: list[TaskScore] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`; what was not asked for is not in it."""
        document: dict[str, Any] = {"program": self.program}
        if self.found is not None:
            document |= self.found.to_json()
        if self.shared:
            document = {name: value for name, value in document.items() if name not in ("seconds", "tokens_per_second")}
        if self.difference is not None:
            document["difference"] = self.difference.to_json()
        if self.speed is not None:
            document["speed"] = self.speed.to_json()
        if self.tasks:
            document["tasks"] = [score.to_json() for score in self.tasks]
        return document


def report(rows: Sequence[Row], visits: Visits | None) -> str:
    """The results as tables for people."""
    parts = []
    if rows[0].found is not None:
        parts.append(_on_text(rows))
    if visits is not None:
        parts.append(f"layer visits: {amount(visits.run)} run, {amount(visits.separate)} in separate passes")
    if rows[0].speed is not None:
        parts.append(_speeds(rows))
    if rows[0].tasks:
        parts.append(_on_tasks(rows))
    return "\n\n".join(parts)


def _on_text(rows: Sequence[Row]) -> str:
    from deepen.probe.distance import Distance

    lines: list[tuple[str, ...]] = []
    for row in rows:
        assert row.found is not None
        found = row.found
        rate = f"{found.tokens_per_second:.4g}"
        if isinstance(found, Distance):
            name = "KL (nats)" if found.kind == "kl" else "relative distance"
            heading = ("program", name, "same choice", "predictions", "tokens/s")
            same = "-" if found.agreement is None else f"{found.agreement:.1%}"
            cells = (row.program, f"{found.value:.4g}", same, f"{found.predictions}", rate)
        else:
            heading = ("program", "perplexity", "bits/byte", "tokens")
            cells = (row.program, amount(found.perplexity), f"{found.bits_per_byte:.4f}", f"{found.tokens}")
            if len(rows) > 1:
                heading += ("nats/token - first", "95 % interval")
                cells += _moved(row.difference)
            if not row.shared:
                heading, cells = (*heading, "tokens/s"), (*cells, rate)
        lines = [heading, *lines[1:], cells]
    return table(lines)


def _moved(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", ""
    if math.isnan(difference.low):
        return f"{difference.value:+.4f}", "one window"
    return f"{difference.value:+.4f}", f"{difference.low:+.4f} to {difference.high:+.4f}"


def _speeds(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [("program", "prefill tokens/s", "decode tokens/s", "peak memory")]
    timed = [(row.program, row.speed) for row in rows if row.speed is not None]
    lines += [(program, f"{one.prefill:.4g}", f"{one.decode:.4g}", size(one.peak)) for program, one in timed]
    first = timed[0][1]
    how = f"a prompt of {first.prompt} tokens, {first.new} new ones, batch 1, median of {first.rounds} rounds"
    return f"{table(lines)}\n{how}; memory: {first.memory}"


def _on_tasks(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [("program", "task", "metric", "value", "stderr", "documents", "shots")]
    for row in rows:
        lines += [
            (
                row.program,
                score.task,
                score.metric,
                f"{score.value:.4f}",
                "-" if score.stderr is None else f"{score.stderr:.4f}",
                "-" if score.samples is None else f"{score.samples}",
                "-" if score.shots is None else f"{score.shots}",
            )
            for score in row.tasks
        ]
    return table(lines, left=3)
