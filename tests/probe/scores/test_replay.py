"""Answering visits from the pass before gives what running them gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepen
from deepen.probe.scores.reading import Reading, open_reading, stream_of
from deepen.probe.scores.replay import before, keeping, skipped, standing_in
from tests.cli.models import TEXT
from tests.probe.scores.planted import CONTEXT, planted

PROGRAMS = ["0-5", "0 (1-2)*2 5", "0 {1|2 3} 4-5", "0-1 3.a 4.f 5", "0 (1 2)*2[kv=first] 3", "0 (1-2)[scale=0.5] 3"]


def reading_of(ck: deepen.Checkpoint, windows: int = 3) -> Reading:
    return open_reading(
        ck, TEXT[: windows * CONTEXT], tower="", context=CONTEXT, tokens=None, batch=2, device="cpu", dtype=None
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_answers_change_nothing(tmp_path: Path, program: str) -> None:
    reading = reading_of(planted(tmp_path / "model").apply(program))
    ids, _ = next(reading.groups())
    with torch.no_grad():
        expected = reading.run(ids, head=True).logits
        with keeping(reading.visits) as kept:
            assert torch.equal(reading.run(ids, head=True).logits, expected)
        assert len(kept.given) == len(kept.returned) == reading.depth
        for visit in range(reading.depth + 1):
            with standing_in(reading.visits, before(reading.visits, kept, visit)):
                assert torch.equal(reading.run(ids, head=True).logits, expected)
        assert torch.equal(reading.run(ids, head=True).logits, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "mamba"])
def test_a_skipped_visit_is_the_program_without_it(tmp_path: Path, family: str) -> None:
    ck = planted(tmp_path / "model", family)
    reading = reading_of(ck)
    ids, _ = next(reading.groups())
    depth = reading.depth
    with torch.no_grad():
        with keeping(reading.visits) as kept:
            reading.run(ids, head=True)
        for visit in range(1, depth - 1):
            program = " ".join(str(at) for at in range(depth) if at != visit)
            expected = ck.apply(program).load()(ids).logits
            answers = before(reading.visits, kept, visit)
            with standing_in(reading.visits, {**answers, visit: skipped(kept, visit)}):
                got = reading.run(ids, head=True).logits
            assert torch.equal(got, expected)


def test_answered_visits_are_not_run(tmp_path: Path) -> None:
    reading = reading_of(planted(tmp_path / "model"))
    ids, _ = next(reading.groups())
    ran = []
    for name, layer in reading.visits._modules.items():
        assert layer is not None
        layer.register_forward_hook(lambda module, args, out, name=name: ran.append(name))
    with torch.no_grad():
        with keeping(reading.visits) as kept:
            reading.run(ids)
        assert ran == [*"012345"]
        ran.clear()
        with standing_in(reading.visits, {**before(reading.visits, kept, 2), 2: skipped(kept, 2)}):
            reading.run(ids)
    assert ran == [*"345"]


def test_the_first_token_can_be_left_as_it_is(tmp_path: Path) -> None:
    reading = reading_of(planted(tmp_path / "model"))
    ids, _ = next(reading.groups())
    with torch.no_grad(), keeping(reading.visits) as kept:
        reading.run(ids)
    stream = stream_of(skipped(kept, 2, first=1).out)
    assert torch.equal(stream[:, 1:], kept.given[2][:, 1:])
    assert torch.equal(stream[:, :1], stream_of(kept.returned[2])[:, :1])
    assert not torch.equal(stream[:, :1], kept.given[2][:, :1])
