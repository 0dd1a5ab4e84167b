"""A native stack as a transformers model: generate, PEFT, Trainer, lm-eval and saving work on it.

    model = DeepenForCausalLM(DeepenConfig(stack={"layers": 8, "program": "0-2 (3-5)*2 6-7", "width": 256, "heads": 4}))
    model.save_pretrained("out")                                   model_type: deepen
    import deepen.hf; AutoModelForCausalLM.from_pretrained("out")

The config of transformers holds that of the stack. Keys and values lie in the cache that transformers makes, one layer
of it for each slot of the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from deepen.errors import UsageError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Result, Stack

MODEL_TYPE = "deepen"


class DeepenConfig(PreTrainedConfig):
    """config.json of a stack.

    Args:
        stack: the fields of a `StackConfig`.
        kwargs: of every config of transformers.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("cache",)

    def __init__(self, stack: dict[str, Any] | StackConfig | None = None, **kwargs: Any) -> None:
        given = stack.model_dump(mode="json") if isinstance(stack, StackConfig) else stack
        built = StackConfig.read(given or {"layers": 1, "width": 8, "heads": 1})
        self.stack = built.model_dump(mode="json", exclude_defaults=True)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = built.vocabulary, built.width, built.layers
        self.num_attention_heads, self.num_key_value_heads = built.heads, built.kv_heads or built.heads
        self.head_dim, self.intermediate_size = built.head, built.inner
        self.max_position_embeddings = built.context
        super().__init__(**{**kwargs, "tie_word_embeddings": built.tied})


class SlotCache:
    """The cache of transformers as a stack sees it: layer i of it is slot i."""

    def __init__(self, cache: Cache, past: int, valid: torch.Tensor | None) -> None:
        self.cache, self.past, self.valid = cache, past, valid

    @property
    def memory(self) -> dict[int, torch.Tensor]:
        return self.cache.__dict__.get("deepen_memory", {})

    @memory.setter
    def memory(self, memory: dict[int, torch.Tensor]) -> None:
        self.cache.__dict__["deepen_memory"] = memory

    @property
    def counts(self) -> tuple[tuple[int, int], ...] | None:
        return getattr(self.cache, "deepen_counts", None)

    @counts.setter
    def counts(self, counts: tuple[tuple[int, int], ...]) -> None:
        self.cache.__dict__["deepen_counts"] = counts

    @property
    def length(self) -> int:
        return self.past

    @length.setter
    def length(self, length: int) -> None:
        """The slots have grown by themselves."""

    def extended(self, valid: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
        """Transformers gives the mask of all tokens."""
        return self.valid

    def slot(self, index: int, writes: bool, new: int) -> TransformersSlot:
        return TransformersSlot(self.cache, index, writes)


class TransformersSlot:
    """One layer of a cache of transformers."""

    def __init__(self, cache: Cache, index: int, writes: bool) -> None:
        self.cache, self.index, self.writes = cache, index, writes

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(keys, values, self.index)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.cache.layers[self.index]
        return layer.keys, layer.values


class DeepenPreTrained(PreTrainedModel):
    """What both classes share."""

    config_class = DeepenConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _tied_weights_keys = {"stack.head.weight": "stack.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: DeepenConfig) -> None:
        super().__init__(config)
        self.stack = Stack(StackConfig.read(config.stack), seed=None)
        # Copies of layers have become layers of their own, and the program says so.
        config.stack = self.stack.config.model_dump(mode="json", exclude_defaults=True)
        config.num_hidden_layers = self.stack.config.layers
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The stack has given every parameter its initial value."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.stack.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.stack.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.stack.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.stack.head = new_embeddings

    def _set_gradient_checkpointing(self, *args: Any, enable: bool = True, **kwargs: Any) -> None:  # pyright: ignore
        self.stack.checkpointing = enable

    def run(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        last: int | None,
        **others: Any,
    ) -> tuple[Result, Cache | None]:
        """A forward pass of the stack; the cache holds the tokens before.

        Raises:
            UsageError: embeddings in the place of ids, or another input that a stack does not take.
        """
        given = sorted(name for name, value in others.items() if value is not None and name not in UNUSED)
        if input_ids is None or given:
            raise UsageError(f"a stack takes input_ids and attention_mask; got {', '.join(given) or 'no input_ids'}")
        if use_cache is None:
            use_cache = cache is not None
        if cache is None and use_cache:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())
        valid = attention_mask
        if valid is not None:
            valid = None if bool(valid.all()) else valid.bool()
        inner: Any = None if cache is None else SlotCache(cache, past, valid)
        result = self.stack(input_ids, cache=inner, valid=valid if cache is None else None, last=last)
        return result, cache


class DeepenModel(DeepenPreTrained):
    """The stream of a stack after its final norm, (B, T, D)."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        result, cache = self.run(input_ids, attention_mask, cache, use_cache, 0, **others)
        return BaseModelOutputWithPast(last_hidden_state=result.stream, cache=cache)  # pyright: ignore


class DeepenForCausalLM(DeepenPreTrained, GenerationMixin):
    """A stack with its head."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        last = logits_to_keep or None
        result, cache = self.run(input_ids, attention_mask, cache, use_cache, last, **others)
        loss: Any = None
        if labels is not None:
            guesses = result.logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(guesses, labels[:, 1:].flatten(), ignore_index=-100)
            loss = loss + sum(result.losses.values())
        return CausalLMOutputWithPast(loss=loss, logits=result.logits, cache=cache)  # pyright: ignore

    def _reorder_cache(self, cache: Cache, beams: torch.Tensor) -> Cache:
        """The cache of the beams (B,) that go on, with what the stack keeps of earlier tokens."""
        cache.reorder_cache(beams)  # pyright: ignore[reportArgumentType]
        memory = SlotCache(cache, 0, None).memory
        memory.update({key: kept.index_select(0, beams) for key, kept in memory.items()})
        return cache


def to_transformers(stack: Stack) -> DeepenForCausalLM:
    """A stack as a model of transformers; the two share their parameters."""
    model = DeepenForCausalLM(DeepenConfig(stack=stack.config))
    model.stack = stack
    return model.train(stack.training)


# Passed by generate and Trainer, without meaning for a stack: it counts positions by the attention mask.
UNUSED = frozenset(
    {
        "position_ids",
        "cache_position",
        "return_dict",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
    }
)
