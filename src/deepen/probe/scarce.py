"""Running out of memory, told as the settings to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepen.errors import UsageError

# What torch and its allocators say; torch has a type of its own for this on accelerators only.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def lowering(**settings: int) -> Iterator[None]:
    """Turns an allocation that fails into an error that names what to lower.

    Args:
        settings: options of the command line that take memory, by name, with their values.

    Raises:
        UsageError: in place of the allocator's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error).lower() for sign in SIGNS):
            raise
        words = " or ".join(f"--{name} (now {value})" for name, value in settings.items())
        raise UsageError(f"out of memory; lower {words}") from error
