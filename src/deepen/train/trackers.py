"""Trackers: the steps of a run shown by TensorBoard or Trackio while it trains.

    log: {tensorboard: runs, trackio: depth}      files in runs/NAME; a run NAME of the project depth

NAME is that of the output. The log of a run, its JSON lines, is the truth: a tracker shows the same figures, takes no
part in training, and one that fails is left out of the rest of the run. Nothing is sent anywhere; Trackio keeps its
projects in a folder of this machine unless its own settings name another place.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from deepen.errors import UsageError
from deepen.train.log import Entry
from deepen.train.recipe_file import RecipeFile


class Tracker(Protocol):
    """Shows figures by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files for TensorBoard.

    Steps at or after the first one that is written, of a run that was killed, are marked as void.

    Args:
        folder: for the files.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._open, self._writer = folder, SummaryWriter, None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self.folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Trackio:
    """A run of a Trackio project; a run of that name that was there is gone on with.

    Args:
        project: its name.
        name: of the run.
        config: plain values that describe it.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._begin = lambda: trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)
        self._run: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # what it prints would stand among the results of the command
        with contextlib.redirect_stdout(sys.stderr):
            self._run = self._begin() if self._run is None else self._run
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._run.finish()


class Trackers:
    """All trackers of a run.

    Args:
        each: by the name of its field.
    """

    def __init__(self, each: Mapping[str, Tracker]) -> None:
        self.each = dict(each)

    def write(self, entry: Entry) -> None:
        """Shows one step."""
        for name, tracker in list(self.each.items()):
            self._try(name, lambda tracker=tracker: tracker.write(entry.step, figures(entry)))

    def close(self) -> None:
        """Ends all of them."""
        for name, tracker in list(self.each.items()):
            self._try(name, tracker.close)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        # another program's code over files and servers: whatever it raises, training goes on
        except Exception as error:
            del self.each[name]
            warnings.warn(f"log.{name}: stopped after {error!r}; the log of the run has every step", stacklevel=3)


def figures(entry: Entry) -> dict[str, float]:
    """What trackers show of a step, by name."""
    found = {name: getattr(entry, name) for name in ("loss", "lr", "grad_norm", "tokens_per_second", "turns")}
    found |= {"held_out/loss": entry.held_out}
    found |= {f"held_out/{name}": value for name, value in (entry.measures or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def trackers_of(recipe: RecipeFile, name: str) -> Trackers:
    """The trackers that a recipe asks for; they write nothing before the first step.

    Raises:
        UsageError: a package is not installed.
    """
    log = recipe.log
    asked: dict[str, Callable[[], Tracker]] = {}
    if log.tensorboard is not None:
        asked["tensorboard"] = lambda folder=log.tensorboard: TensorBoard(Path(folder) / name)
    if log.trackio is not None:
        asked["trackio"] = lambda project=log.trackio: Trackio(project, name, recipe.plain())
    made = dict[str, Tracker]()
    for field, make in asked.items():
        try:
            made[field] = make()
        except ImportError as error:
            raise UsageError(
                f"log.{field} needs {field}, which is not installed: pip install 'deepen[{field}]', or leave it out"
            ) from error
    return Trackers(made)
