"""Reading a checkpoint once for several programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import deepen
from deepen.checkpoint.tiny import output_of, tiny_checkpoint, tiny_inputs
from deepen.probe.once import ReadOnce, read_once


def test_tensors_are_read_once_and_models_are_the_same(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "llama")
    opened = deepen.open(tmp_path / "model")
    reads: Counter[str] = Counter()

    class Counting(ReadOnce):
        def read(self, name: str) -> torch.Tensor:
            reads[name] += 1
            return self.source.read(name)

    shared = read_once(replace(opened, source=Counting(opened.source)))
    for program in ("0-5", "0-2 {3|4} 5", "0-5"):
        got, expected = shared.apply(program).load(), opened.apply(program).load()
        inputs = tiny_inputs(expected)
        assert torch.equal(output_of(got, inputs), output_of(expected, inputs))
    assert set(reads.values()) == {1}
