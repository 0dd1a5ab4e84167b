"""What is run while a model is timed, and which memory is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepen
from deepen.errors import FamilyError, UsageError
from deepen.probe import speed as timing
from deepen.probe.speed import Peak, speed
from tests.cli.models import checkpoint


def test_rounds_forwards_and_their_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepen.open(checkpoint(tmp_path / "m", "llama")).apply("0-2 (3)*2").load()
    # any token would end the text, if the checkpoint's own settings were followed
    model.generation_config.eos_token_id = list(range(96))  # pyright: ignore[reportOptionalMemberAccess]
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    ticks = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    found = speed(model, prompt=20, new=5, rounds=3)
    # one round before those that count, and each reads the prompt once and then token after token
    assert lengths == [20, 1, 1, 1, 1] * 4
    assert model.generation_config.eos_token_id == list(range(96))  # pyright: ignore[reportOptionalMemberAccess]
    # a tick a token: the prompt takes one, the four tokens after the first take four
    assert (found.prefill, found.decode) == (20.0, 1.0)
    assert (found.prompt, found.new, found.rounds) == (20, 5, 3)
    assert set(found.to_json()) == {"prompt", "new", "rounds", "prefill", "decode", "peak", "memory"}


@pytest.mark.parametrize("family", ["t5", "mamba"])
def test_other_kinds_of_model_that_generate(family: str, tmp_path: Path) -> None:
    found = speed(deepen.open(checkpoint(tmp_path / family, family)).load(), prompt=6, new=3, rounds=1)
    assert found.prefill > 0 < found.decode


def test_the_peak_is_of_what_was_held_in_between(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    megabytes = 200
    before = Peak(torch.device("cpu"))
    quiet = before.read()
    held: Any = torch.ones(megabytes * 2**18)
    del held
    assert before.read() - quiet > 0.9 * megabytes * 2**20
    # where the peak cannot be set back it is said that it is the peak of the whole process
    monkeypatch.setattr(timing, "CLEAR", tmp_path / "absent" / "clear_refs")
    whole = Peak(torch.device("cpu"))
    assert whole.memory == timing.RESIDENT_SINCE_START
    assert whole.read() > 0.9 * megabytes * 2**20


def test_refusals(tmp_path: Path) -> None:
    llama = deepen.open(checkpoint(tmp_path / "llama", "llama")).load()
    for options, words in (
        ({"prompt": 0}, "prompt=0"),
        ({"new": 1}, "new=1"),
        ({"rounds": 0}, "rounds=0"),
        ({"prompt": 60, "new": 5}, "65 tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            speed(llama, **{"prompt": 4, "new": 2, **options})
    for family in ("distilbert", "vit"):
        with pytest.raises(FamilyError, match="generates no text"):
            speed(deepen.open(checkpoint(tmp_path / family, family)).load(), prompt=4, new=2)
