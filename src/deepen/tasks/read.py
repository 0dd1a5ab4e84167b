"""The tasks by their names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from deepen.errors import UsageError, nearest
from deepen.tasks.task import Task

# What a recipe calls a task -> its class.
TASKS = {
    "text": "deepen.tasks.text:Text",
    "images": "deepen.tasks.images:Images",
    "series": "deepen.tasks.series:TimeSeries",
    "p-hop": "deepen.tasks.p_hop:PHop",
    "modular": "deepen.tasks.modular:Modular",
    "listops": "deepen.tasks.listops:ListOps",
    "lego": "deepen.tasks.lego:Lego",
    "parity": "deepen.tasks.parity:Parity",
    "dyck": "deepen.tasks.dyck:Dyck",
    "copying": "deepen.tasks.copying:Copying",
}


def task_class(name: object) -> type[Task]:
    """The class of a task.

    Raises:
        UsageError: there is none of this name; the nearest is given.
    """
    if not isinstance(name, str) or name not in TASKS:
        close = nearest(name, TASKS) if isinstance(name, str) else ""
        raise UsageError(f"no task {name!r}{close}; known are {', '.join(TASKS)}")
    module, attribute = TASKS[name].split(":")
    return getattr(import_module(module), attribute)


def read_task(options: Mapping[str, Any]) -> Task:
    """A task from its name and options.

    Raises:
        UsageError: no such task.
        ValidationError: an option that it does not have, or a value that does not fit.
    """
    return task_class(options.get("name")).model_validate(dict(options))
