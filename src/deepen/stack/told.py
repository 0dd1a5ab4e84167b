"""What is wrong with the fields of a configuration, in one line: `wiring.streams: got 0, must be >= 1`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from deepen.errors import nearest

BOUNDS = {"greater_than_equal": (">=", "ge"), "greater_than": (">", "gt"), "less_than_equal": ("<=", "le"),
          "less_than": ("<", "lt")}  # fmt: skip
# Of an error of `at`: the fields are those of its own text.
AT = "at"


def at(path: str, reason: str) -> PydanticCustomError:
    """What a validator raises of a part of its value, such as an option of a table."""
    return PydanticCustomError(AT, "{reason}", {"path": path, "reason": reason})


def told(error: ValidationError, known: Callable[[tuple[str, ...]], Iterable[str]], prefix: str = "") -> str:
    """The first thing that is wrong.

    Args:
        error: of the validation.
        known: the keys that a table at a path has.
        prefix: the path of what was validated.
    """
    # a key that does not exist explains the one that is missing
    first: Any = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    inner = tuple(map(str, first["loc"]))
    place = [*([prefix] if prefix else []), *inner]
    if first["type"] == "extra_forbidden":
        return f"no key {'.'.join(place)!r}{nearest(inner[-1], known(inner[:-1]))}"
    if first["type"] == AT:
        place.append(first["ctx"]["path"])
    path = ".".join(place)
    return f"{path}: {reason(first)}" if path else reason(first)


def reason(error: Any) -> str:
    """What one value should have been."""
    if error["type"] in BOUNDS:
        sign, bound = BOUNDS[error["type"]]
        return f"got {error['input']!r}, must be {sign} {error['ctx'][bound]:g}"
    if error["type"] == "missing":
        return "is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not message.startswith("Input should be"):
        return message
    return f"got {error['input']!r}, must be{message.removeprefix('Input should be')}"
