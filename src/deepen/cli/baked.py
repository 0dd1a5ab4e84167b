"""Bakes a program, reloads it with plain transformers and compares logits with the model in memory.

The tolerance is four times the difference that the model itself shows between two exact ways of computing attention,
`eager` and `sdpa`: rounding alone explains that much.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepen.cli.output import note
from deepen.cli.progress import progress
from deepen.errors import SaveError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint

# Run in a process of its own, in which deepen is never imported.
PLAIN = """\
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
ids = torch.tensor(json.loads(sys.argv[3]))
with torch.inference_mode():
    model(ids, use_cache=False).logits.numpy().tofile(sys.argv[2])
assert "deepen" not in sys.modules
print(model.config.num_hidden_layers)
"""
TIMES = 4.0


@dataclass(frozen=True)
class Baked:
    """What the comparison gave.

    Attributes:
        layers: layers of the baked model.
        bytes: of its weights.
        difference: largest absolute difference of the logits.
        own: the same between the model's eager and sdpa attention.
        largest: largest absolute logit, for scale.
        tokens: positions compared.
    """

    layers: int
    bytes: int
    difference: float
    own: float
    largest: float
    tokens: int

    @property
    def tolerance(self) -> float:
        return TIMES * self.own

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance


def bake_and_compare(checkpoint: Checkpoint, ids: list[int], beside: Path) -> Baked:
    """Bakes into a folder that is removed afterwards.

    Args:
        checkpoint: the checkpoint with the program to bake.
        ids: tokens to compare the logits of.
        beside: where the folder is made.

    Raises:
        SaveError: the result cannot be written or reloaded, or differs by more than the tolerance.
    """
    import numpy as np

    memory = {name: _logits(checkpoint, ids, name) for name in ("eager", "sdpa")}
    own = float(np.abs(memory["eager"] - memory["sdpa"]).max())
    with tempfile.TemporaryDirectory(dir=beside, prefix=".baked-") as place:
        folder, answer = Path(place) / "model", Path(place) / "logits"
        with progress("baking", checkpoint.changes(bake=True).bytes, "bytes") as step:
            changes = checkpoint.save(folder, bake=True, progress=step)
        note("reloading with plain transformers")
        command = [sys.executable, "-c", PLAIN, str(folder), str(answer), json.dumps([ids])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SaveError(f"plain transformers cannot load the baked model: {last}")
        plain = np.fromfile(answer, dtype=np.float32).reshape(memory["sdpa"].shape)
    result = Baked(
        layers=int(done.stdout),
        bytes=changes.bytes,
        difference=float(np.abs(plain - memory["sdpa"]).max()),
        own=own,
        largest=float(np.abs(plain).max()),
        tokens=len(ids),
    )
    if not result.equal:
        raise SaveError(
            f"the baked model differs from the model in memory by {result.difference:.3g}, more than the tolerance "
            f"{result.tolerance:.3g} ({TIMES:g} times the {own:.3g} between eager and sdpa attention)"
        )
    return result


def _logits(checkpoint: Checkpoint, ids: list[int], attention: str) -> Any:
    """Logits of the model in memory, fp32, [1, t, vocabulary]."""
    import torch

    model = checkpoint.load(dtype="float32", attn_implementation=attention)
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits.numpy()
