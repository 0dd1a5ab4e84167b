"""Registers deepen's native form, and native stacks, with transformers.

    import deepen.hf
    model = AutoModelForCausalLM.from_pretrained("out")     # a folder that deepen saved in its native form

The model that comes back is of the family's own class, running the stored program.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from deepen.checkpoint.layout import NATIVE_TYPE
from deepen.checkpoint.open import open_checkpoint
from deepen.checkpoint.stack_model import MODEL_TYPE, DeepenConfig, DeepenForCausalLM, DeepenModel
from deepen.errors import UsageError


class DeepenCheckpointConfig(PreTrainedConfig):
    """config.json of the native form: the program, its bank and the original config (`base`)."""

    model_type = NATIVE_TYPE

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        return self


class DeepenCheckpointModel(PreTrainedModel):
    """What the auto classes find for the native form; never instantiated itself."""

    config_class = DeepenCheckpointConfig

    @classmethod
    def from_pretrained(
        cls,
        path: Any,
        *args: Any,
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Opens and loads; an option of transformers that deepen does not honour is refused, never ignored.

        Raises:
            UsageError: an option other than the named ones, or a device map over several devices.
        """
        left = sorted(name for name, value in kwargs.items() if name not in UNUSED and value not in (None, False, ""))
        if left or args or not isinstance(device_map, str | None) or device_map == "auto":
            names = ", ".join(left) or "positional arguments or a device map"
            raise UsageError(f"a deepen checkpoint cannot be loaded with {names}; use dtype= and one device")
        dtype = dtype if dtype is not None else torch_dtype
        return open_checkpoint(path).load(
            dtype=None if dtype == "auto" else dtype,
            device=device_map or "cpu",
            attn_implementation=attn_implementation,
        )


# Passed by the auto classes themselves, or without meaning for a folder of safetensors.
UNUSED = frozenset(
    {
        "config",
        "trust_remote_code",
        "code_revision",
        "adapter_kwargs",
        "use_safetensors",
        "low_cpu_mem_usage",
        "_from_auto",
        "_commit_hash",
    }
)

AutoConfig.register(NATIVE_TYPE, DeepenCheckpointConfig)
for auto in (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
):
    auto.register(DeepenCheckpointConfig, DeepenCheckpointModel)

AutoConfig.register(MODEL_TYPE, DeepenConfig)
AutoModel.register(DeepenConfig, DeepenModel)
AutoModelForCausalLM.register(DeepenConfig, DeepenForCausalLM)
