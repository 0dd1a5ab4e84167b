"""Keys and values of the tokens so far, one slot for each visit that owns one."""

from __future__ import annotations

import torch

from deepen.errors import UsageError


class Cache:
    """Slots of a stack, each (B, KV heads, room, head width); the room doubles when it is full.

    Args:
        slots: of the plan.
        room: tokens to hold before the first growth.

    Attributes:
        length: tokens held.
        memory: what a wiring keeps of earlier tokens, by site.
        counts: the loop counts that its tokens were computed with.
    """

    def __init__(self, slots: int, room: int = 64) -> None:
        self.keys: list[torch.Tensor | None] = [None] * slots
        self.values: list[torch.Tensor | None] = [None] * slots
        self.room, self.length = room, 0
        self.memory: dict[int, torch.Tensor] = {}
        self.counts: tuple[tuple[int, int], ...] | None = None
        self.valid: torch.Tensor | None = None

    def slot(self, index: int, writes: bool, new: int) -> CacheSlot:
        """The slot as one visit sees it in a pass over `new` tokens."""
        return CacheSlot(self, index, writes, new)

    def extended(self, valid: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Which of the tokens held and of the new ones `tokens`: (B, T) are no padding; remembered."""
        new = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid.bool()
        if self.length:
            held = self.valid
            held = new.new_ones(len(new), self.length) if held is None else held
            new = torch.cat([held, new], dim=1)
        self.valid = new
        return new

    def crop(self, length: int) -> None:
        """Forgets the tokens from position `length` on.

        Raises:
            UsageError: it holds fewer tokens, or a wiring keeps more than keys and values.
        """
        if not 0 <= length <= self.length:
            raise UsageError(f"the cache holds {self.length} tokens; cannot keep the first {length}")
        if self.memory:
            raise UsageError("the wiring keeps a window of earlier tokens, which cannot be cropped; start a new cache")
        self.length = length
        self.valid = None if self.valid is None else self.valid[:, :length]

    @property
    def bytes(self) -> int:
        """What the tokens held take, without the spare room."""
        kept = (tensor for tensor in (*self.keys, *self.values) if tensor is not None)
        return sum(tensor[:, :, : self.length].numel() * tensor.element_size() for tensor in kept)


class CacheSlot:
    """One slot during one forward pass, whose tokens come after the `length` that the cache holds."""

    def __init__(self, cache: Cache, index: int, writes: bool, new: int) -> None:
        self.cache, self.index, self.writes, self.new = cache, index, writes, new

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache, index = self.cache, self.index
        end = cache.length + self.new
        held, held_values = cache.keys[index], cache.values[index]
        if held is None or held_values is None or held.shape[2] < end:
            held, held_values = (self._grown(old, new, end) for old, new in ((held, keys), (held_values, values)))
            cache.keys[index], cache.values[index] = held, held_values
        held[:, :, cache.length : end] = keys
        held_values[:, :, cache.length : end] = values
        return held[:, :, :end], held_values[:, :, :end]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.keys[self.index], self.cache.values[self.index]
        assert keys is not None
        assert values is not None
        end = self.cache.length + self.new
        return keys[:, :, :end], values[:, :, :end]

    def _grown(self, old: torch.Tensor | None, new: torch.Tensor, end: int) -> torch.Tensor:
        room = max(end, self.cache.room if old is None else 2 * old.shape[2])
        made = new.new_zeros(*new.shape[:2], room, new.shape[3])
        if old is not None:
            made[:, :, : self.cache.length] = old[:, :, : self.cache.length]
        return made


class PassSlot:
    """A slot that lives for one forward pass: what one visit writes, others read."""

    def __init__(self, shared: dict[int, tuple[torch.Tensor, torch.Tensor]], index: int, writes: bool) -> None:
        self.shared, self.index, self.writes = shared, index, writes

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shared[self.index] = keys, values
        return keys, values

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.shared[self.index]
