"""What a visit sees of the cache: its own slot under every index.

A layer of a Hugging Face model asks the cache for entry `layer_idx`, a number it was given when it was built. Two
visits of one layer would meet in one entry. So a visit hands its layer a view in which every index is the visit's
slot; the layer is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from deepen.errors import FamilyError

# Keys and values of a turn, and how many of them were there before the pass.
Shared = tuple[tuple[torch.Tensor, torch.Tensor], Any]


class _EverySlot:
    """A list of cache layers in which every index is one layer."""

    def __init__(self, layers: list[Any], slot: int) -> None:
        self._layers, self._slot = layers, slot

    def __getitem__(self, index: int) -> Any:
        return self._layers[self._slot]

    def __len__(self) -> int:
        return len(self._layers)


class _SharedSlot:
    """The cache layers of a visit that shares its keys and values, which a layer may only reach through `update`."""

    def __getitem__(self, index: int) -> Any:
        raise FamilyError(
            "kv=first shares keys and values between turns, and this layer keeps more than keys and values in its cache"
        )

    def __len__(self) -> int:
        return 0


class SlotView(DynamicCache):
    """A cache in which every layer index is the slot of one visit.

    Args:
        cache: the cache shared by all visits; None when the pass keeps none.
        slot: the visit's slot.
        shared: keys and values of this pass by slot, for visits that reuse those of an earlier turn (`kv=first`).
        reads: take keys and values from `shared` instead of writing the slot.
    """

    def __init__(
        self, cache: Cache | None, slot: int, shared: dict[int, Shared] | None = None, reads: bool = False
    ) -> None:
        self.cache, self.slot, self.shared, self.reads = cache, slot, shared, reads

    @property
    def layers(self) -> Any:
        if self.shared is not None:
            return _SharedSlot()
        return _EverySlot(self.cache.layers, self.slot) if self.cache is not None else []

    def __len__(self) -> int:
        return len(self.cache) if self.cache is not None else 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self.reads:
            assert self.shared is not None
            return self.shared[self.slot][0]
        pair, past = (key_states, value_states), self.get_seq_length()
        past = past.clone() if isinstance(past, torch.Tensor) else past
        if self.cache is not None:
            pair = self.cache.update(key_states, value_states, self.slot, *args, **kwargs)
        if self.shared is not None:
            self.shared[self.slot] = pair, past
        return pair

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.reads and self.shared is not None:
            return self.shared[self.slot][1]
        return self.cache.get_seq_length(self.slot) if self.cache is not None else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.cache.get_query_offset(self.slot) if self.cache is not None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.get_max_length(self.slot) if self.cache is not None else -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.slot) if self.cache is not None else (query_length, 0)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if self.shared is not None:
            self._recurrent()
        return self.cache is not None and self.cache.has_previous_state(self.slot, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent().get_conv_state(self.slot, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs):
        return self._recurrent().update_conv_state(conv_states, self.slot, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent().get_recurrent_state(self.slot, state_idx)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs):
        return self._recurrent().update_recurrent_state(recurrent_states, self.slot, state_idx, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._recurrent().get_linear_cache(self.slot)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._recurrent().set_linear_cache(self.slot, linear_cache)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self._recurrent().update_indexer(indexer_key_states, self.slot)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.cache is not None and self.cache.is_recording_past(self.slot)

    def _recurrent(self) -> Any:
        if self.shared is not None:
            raise FamilyError("kv=first shares keys and values between turns, and this layer keeps a recurrent state")
        assert self.cache is not None
        return self.cache


class _SlotFlags:
    """`is_updated` of an encoder-decoder cache, in which every index is one slot."""

    def __init__(self, flags: dict[int, bool], slot: int) -> None:
        self._flags, self._slot = flags, slot

    def get(self, index: int, default: bool | None = None) -> bool | None:
        return self._flags.get(self._slot, default)

    def __getitem__(self, index: int) -> bool:
        return self._flags[self._slot]

    def __setitem__(self, index: int, value: bool) -> None:
        self._flags[self._slot] = value


class EncoderDecoderSlotView(EncoderDecoderCache):
    """The same for a pair of self- and cross-attention caches."""

    def __init__(self, cache: EncoderDecoderCache, slot: int, shared: dict[int, Shared] | None, reads: bool) -> None:
        self.self_attention_cache = SlotView(cache.self_attention_cache, slot, shared, reads)
        self.cross_attention_cache = SlotView(cache.cross_attention_cache, slot)
        self.is_updated = _SlotFlags(cache.is_updated, slot)  # pyright: ignore[reportAttributeAccessIssue]


def view(cache: Cache | None, slot: int, shared: dict[int, Shared] | None = None, reads: bool = False) -> Cache:
    """The cache as the visit with this slot sees it."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderSlotView(cache, slot, shared, reads)
    return SlotView(cache, slot, shared, reads)


def keep_slots(cache: Cache, entries: int, owners: tuple[int, ...], make: Callable[[], list[Any]]) -> None:
    """Brings a fresh cache to one layer a slot, in place; one that already has them, or grows by itself, stays.

    Args:
        cache: as transformers builds it, normally from a config whose depth is the number of visits.
        entries: the number of visits.
        owners: for each slot the visit that owns it.
        make: makes one cache layer a visit, for a cache that was sized by another tower's depth (T5).
    """
    pair = isinstance(cache, EncoderDecoderCache)
    changed = False
    for each in (cache.self_attention_cache, cache.cross_attention_cache) if pair else (cache,):
        if each.layer_class_to_replicate is not None or len(each.layers) == len(owners) != entries:
            continue
        if len(each.layers) != entries and type(each) is DynamicCache:
            each.layers = make()
            changed = True
        if len(owners) != entries == len(each.layers):
            each.layers = [each.layers[owner] for owner in owners]
            changed = True
    if pair and changed:
        cache.is_updated = dict.fromkeys(range(len(owners)), False)
