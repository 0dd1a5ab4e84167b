"""Ctrl-C that is not lost.

Python drops a KeyboardInterrupt that rises inside of a finaliser or of a callback of the garbage collector, which the
seconds of importing torch and transformers are full of. The command would go on as if nothing had been pressed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Whether an interrupt came in this command.
_came = threading.Event()


@contextmanager
def interrupts() -> Iterator[None]:
    """Remembers an interrupt beside raising it; `raise_dropped` raises it again. Only the main thread takes signals."""
    _came.clear()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        _came.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _came.clear()


def raise_dropped() -> None:
    """Called as work goes on.

    Raises:
        KeyboardInterrupt: one came, and whoever it was raised in dropped it.
    """
    if _came.is_set():
        raise KeyboardInterrupt
