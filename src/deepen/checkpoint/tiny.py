"""A tiny random model of every family: what the parity suite builds.

Weights are redrawn with standard deviation 0.3 so that faults show, windows are 8 tokens so that they bite, and depth
is 6 (4 and 3 for the two towers of an encoder-decoder) unless a family needs another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deepen.checkpoint.family import known_families
from deepen.checkpoint.skeleton import model_class


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of a few thousand parameters."""
    return CONFIG_MAPPING[model_type](**{**known_families()[model_type].tiny, **changes})


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of `tiny_config`, every weight drawn with standard deviation 0.3, in fp32 and eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    model = model_class({"architectures": config.architectures}, config, model_type)(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                centre = parameter.mean() if "norm" in name.lower() or "ln_" in name else 0.0
                parameter.normal_(0.0, 0.3).add_(centre)
    return model.eval()


def tiny_checkpoint(folder: Path, model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Saves `tiny_model` to `folder` as transformers does and returns it."""
    model = tiny_model(model_type, seed, **changes)
    model.save_pretrained(folder)
    return model


def tiny_inputs(model: PreTrainedModel, tokens: int = 24, batch: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs that the model takes: token ids, pixels, or sound, and decoder ids for an encoder-decoder."""
    generator = torch.Generator("cpu").manual_seed(seed)
    config = model.config
    family = known_families().get(config.model_type)
    if family is not None and family.inputs is not None:
        torch.manual_seed(seed)
        return family.inputs(config, tokens)
    main = model.main_input_name
    if main == "pixel_values":
        height, width = _sides(stated(config, "image_size"))
        channels = getattr(config, "num_channels", None) or 3
        return {main: torch.randn(batch, channels, height, width, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(batch, 400, generator=generator)}
    if main == "input_features":
        frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else 4 * tokens
        features = torch.randn(batch, config.num_mel_bins, frames, generator=generator)
        if not config.is_encoder_decoder:
            return {main: features}
        decoder = torch.randint(4, config.vocab_size, (batch, tokens), generator=generator)
        return {main: features, "decoder_input_ids": decoder}
    vocabulary = stated(config, "vocab_size")
    ids = torch.randint(4, vocabulary, (batch, tokens), generator=generator)
    if config.is_encoder_decoder:
        decoder = torch.randint(4, vocabulary, (batch, tokens), generator=generator)
        return {"input_ids": ids, "decoder_input_ids": decoder}
    return {"input_ids": ids}


def stated(config: PreTrainedConfig, name: str) -> Any:
    """A field of a config, or of the first config inside it that has it."""
    inner = [getattr(config, each, None) for each in getattr(config, "sub_configs", None) or {}]
    for each in (config, config.get_text_config(), *inner):
        if (value := getattr(each, name, None)) is not None:
            return value
    raise AttributeError(f"{type(config).__name__} has no {name}")


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, (list, tuple)):
        return size[0], size[-1]
    return size, size


def output_of(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """Logits, or the last hidden state of a model without a head, or all that a model of two towers gives; in fp32."""
    with torch.no_grad():
        result = model(**inputs, **more)
    for name in ("logits", "last_hidden_state"):
        if (found := getattr(result, name, None)) is not None:
            return found.float()
    tensors = [value for value in result.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return torch.cat([tensor.float().flatten() for tensor in tensors])
