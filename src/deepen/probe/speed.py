"""How fast a model reads and writes, and what memory it needs for that.

    prompt (t tokens) -> [ one forward ] -> token 1 -> [ one forward ] -> token 2 ... token n
                         prefill            decode, n - 1 times

`generate` is timed, with its cache, its masks and its choice of the likeliest token: what a program costs those who
use it. The batch is 1, the prompt is fixed, nothing ends a text early. Each figure is the median of some rounds; one
round before them does not count.

    prefill = t / seconds to the first token        decode = (n - 1) / seconds from the first token to the last

Tokens reach the CPU one by one, so that a device which works by itself is waited for.

The peak of memory is that of all rounds: what torch held on a CUDA device, weights included; elsewhere the resident
set of the process, with Python, torch and whatever else it holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from deepen.errors import FamilyError, UsageError
from deepen.probe.windows import require_context

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.load import PreTrainedModel

ROUNDS = 3
HELD_BY_TORCH, RESIDENT = "held by torch on the device", "resident set while timed"
RESIDENT_SINCE_START = "resident set since the process started"
# Linux: writing 5 to the first sets the peak in the second back to what is resident now.
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was timed, and the figures.

    Attributes:
        prompt: tokens of the prompt.
        new: tokens generated after it.
        rounds: rounds that count.
        prefill: tokens of the prompt read a second.
        decode: tokens generated a second, after the first.
        peak: bytes of memory at the peak.
        memory: which memory that is.
    """

    prompt: int
    new: int
    rounds: int
    prefill: float
    decode: float
    peak: int
    memory: str

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for `json.dumps`."""
        return asdict(self)


def speed(model: PreTrainedModel, *, prompt: int = 480, new: int = 32, rounds: int = ROUNDS) -> Speed:
    """How fast a model generates, and its peak of memory; see the head of the file for what is timed.

    Args:
        model: a model that generates text, in eval mode.
        prompt: tokens of the prompt.
        new: tokens to generate.
        rounds: rounds that count.

    Raises:
        FamilyError: the model generates no text.
        UsageError: fewer than 1 token of prompt, 2 new ones or 1 round, or more tokens than the model has positions.

    Example:
        >>> import deepen
        >>> deepen.speed(deepen.open("model").load(), prompt=256).decode        # doctest: +SKIP
    """
    import torch

    if not model.can_generate() or model.main_input_name != "input_ids":
        raise FamilyError(f"{type(model).__name__} generates no text, so there is no speed of prefill and decoding")
    for name, value, least in (("prompt", prompt, 1), ("new", new, 2), ("rounds", rounds, 1)):
        if value < least:
            raise UsageError(f"speed with {name}={value}: expected at least {least}")
    if not model.config.is_encoder_decoder:
        require_context(model.config, prompt + new)
    ids = torch.arange(prompt, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    with _plain(model, new):
        _generate(model, ids)
        peak = Peak(model.device)
        times = [_generate(model, ids).times for _ in range(rounds)]
    first = median(at[1] - at[0] for at in times)
    rest = median(at[-1] - at[1] for at in times)
    return Speed(
        prompt=prompt,
        new=new,
        rounds=rounds,
        prefill=prompt / first,
        decode=(new - 1) / rest,
        peak=peak.read(),
        memory=peak.memory,
    )


class Clock:
    """Takes tokens as `generate` makes them and keeps the time of each; the first that comes is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to be done."""


@contextmanager
def _plain(model: PreTrainedModel, new: int) -> Iterator[None]:
    """The model with settings of ours: `generate` fills in what its own say, such as the token that ends a text."""
    stored: Any = model.generation_config
    model.generation_config = type(stored)(
        max_new_tokens=new, pad_token_id=0, decoder_start_token_id=stored.decoder_start_token_id
    )
    try:
        yield
    finally:
        model.generation_config = stored


def _generate(model: PreTrainedModel, ids: torch.Tensor) -> Clock:
    import torch

    clock: Any = Clock()
    decode: Any = model.generate
    with torch.inference_mode():
        decode(ids, attention_mask=torch.ones_like(ids), streamer=clock)
    return clock


class Peak:
    """The peak of memory from now on.

    Attributes:
        memory: which memory that is.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.memory = HELD_BY_TORCH
            return
        try:
            CLEAR.write_text("5")
            self.memory = RESIDENT
        except OSError:
            self.memory = RESIDENT_SINCE_START

    def read(self) -> int:
        """Bytes at the peak."""
        if self.memory == HELD_BY_TORCH:
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        return largest_resident()


def largest_resident() -> int:
    """The largest resident size of this process since it started, in bytes; on Linux since it was last cleared."""
    try:
        line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except OSError:
        # where Linux has this too it also counts the process that started this one
        import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others kilobytes
    return most if sys.platform == "darwin" else most * 1024
