"""Transforms are tried on two families here and on all that a test names in the slow set."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepen.checkpoint.family import known_families

FIRST = ("llama", "gpt2")
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        named = getattr(item, "callspec", None)
        if named is not None and item.path.is_relative_to(HERE):
            families = {value for value in named.params.values() if isinstance(value, str)} & known_families().keys()
            if families - set(FIRST):
                item.add_marker(pytest.mark.slow)
