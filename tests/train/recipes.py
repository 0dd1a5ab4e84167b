"""Small recipes for tests."""

from __future__ import annotations

from typing import Any

from deepen.train.recipe_file import RecipeFile

COPYING: dict[str, Any] = {
    "stack": {"layers": 2, "width": 16, "heads": 2},
    "task": {"name": "copying", "letters": 3, "length": [1, 4], "longer": [5, 6], "examples": 20},
    "train": {"steps": 12, "batch": 4, "evaluate": 6, "save": 3, "warmup": 2},
}


def recipe(**changes: Any) -> RecipeFile:
    """The recipe with some fields changed; `train__steps` is `train.steps`."""
    data = {name: dict(table) for name, table in COPYING.items()}
    for path, value in changes.items():
        table, _, field = path.partition("__")
        if field:
            data.setdefault(table, {})[field] = value
        else:
            data[table] = value
    return RecipeFile.of(data)
