"""An allocation that fails names the settings to lower; any other failure stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepen
from deepen.errors import UsageError
from deepen.probe.scarce import lowering
from deepen.probe.trie import Evaluator
from tests.cli.models import TEXT, checkpoint


def test_a_real_allocation_that_fails() -> None:
    with (
        pytest.raises(UsageError, match=r"out of memory; lower --batch \(now 4\) or --context \(now 512\)"),
        lowering(batch=4, context=512),
    ):
        torch.empty(1 << 60)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), lowering(batch=1):
        raise RuntimeError("shapes do not match")


def test_a_search_names_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Evaluator, "evaluate", scarce)
    ck = deepen.open(checkpoint(tmp_path / "model"))
    with pytest.raises(UsageError, match=r"--batch \(now 1\) or --context \(now 16\) or --memory \(now 1073\)"):
        deepen.search(ck, TEXT, context=16, tokens=64, held_out_tokens=64)
