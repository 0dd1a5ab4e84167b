"""Writes the states of a run: at once, or in the background.

    update 50 | forward, backward of 51 | update 51 | ...
              |  copy the state         |  write it, rename it

Nothing but an update changes what a state holds, so the copy is made while the next gradient is computed, and the
update waits for it. The folder of a state gets its name when all of it is written; a run that is killed before goes on
from the state before. On Linux the thread that does both has the lowest priority: it takes what training leaves free.

Source of the overlap: Mohan et al., CheckFreq, FAST 2021.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from deepen.train.distributed import ALONE, Processes
from deepen.train.state import RunState, write_state

# The lowest priority.
LAST = 19


class Saver:
    """Writes states, one after another.

    Args:
        folder: of the run.
        processes: who writes.
        background: write in a thread.
    """

    def __init__(self, folder: Path, processes: Processes = ALONE, *, background: bool = False) -> None:
        self.folder, self.processes, self.background = folder, processes, background
        self._copies: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, state: RunState) -> None:
        """Writes a state; in the background, once the one before is written.

        Raises:
            SaveError: this state, or in the background the one before, cannot be written.
        """
        self.finish()
        if not self.background:
            write_state(self.folder, state, self.processes)
            return
        self._copied.clear()
        self._thread = threading.Thread(target=self._write, args=(state,), name="saver")
        self._thread.start()

    def settle(self) -> None:
        """Waits until an update may change what the last state holds."""
        if self._thread is not None:
            self._copied.wait()

    def finish(self) -> None:
        """Waits until the last state is written.

        Raises:
            SaveError: it cannot be written; the state before it is whole.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _write(self, state: RunState) -> None:
        if sys.platform == "linux":
            # a priority is one of a thread there; training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
        try:
            try:
                self._copies = {name: self._copy(name, each) for name, each in state.tensors.items()}
            finally:
                self._copied.set()
            write_state(self.folder, replace(state, tensors=self._copies), self.processes, self.processes.saving)
        except Exception as error:
            # raised where the run waits for this thread
            self._error = error

    @torch.no_grad()
    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, in the memory of the one before where it fits; shares stay on their device, others leave it."""
        held = self._copies.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty_like(tensor, device=tensor.device if hasattr(tensor, "to_local") else "cpu")
        return held.copy_(tensor)
