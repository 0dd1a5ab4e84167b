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

from deepen.checkpoint.skeleton import model_class

COMMON: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 3, **SLIDING}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 4}
DEEPSEEK = {
    **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip

# Keys that replace COMMON altogether are marked by "only".
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "mistral": SLIDING,
    "qwen2": {**MIXED, "use_sliding_window": True},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "phi3": {"pad_token_id": 0, **SLIDING},
    "olmo3": MIXED,
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "ministral": MIXED,
    "exaone4": MIXED,
    "cohere2": MIXED,
    "starcoder2": SLIDING,
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "mlp_only_layers": [2], "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [2]},
    "olmoe": EXPERTS,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
              "topk_group": 1, **MIXED},
    "gpt2": {"only": GPT},
    "gptj": {"only": {**GPT, "rotary_dim": 4}},
    "gpt_neo": {
        "only": {
            "vocab_size": 96, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "intermediate_size": 48,
            "max_position_embeddings": 64, "window_size": 8, "attention_types": [[["global", "local"], 3]],
            "bos_token_id": 1, "eos_token_id": 2,
        }
    },
    "bloom": {
        "only": {"vocab_size": 96, "hidden_size": 32, "n_layer": 6, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    },
    "falcon": {
        "only": {
            "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_kv_heads": 2,
            "ffn_hidden_size": 48, "new_decoder_architecture": True, "bos_token_id": 1, "eos_token_id": 2,
        }
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "jamba": {
        **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "distilbert": {"only": {"vocab_size": 96, "dim": 32, "n_layers": 6, "n_heads": 4, "hidden_dim": 48,
                            "max_position_embeddings": 64}},
    "electra": {"embedding_size": 32},
    "deberta-v2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2, "local_attention": 8,
        "cls_token_id": 1, "sep_token_id": 2,
    },
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
    "t5": {"only": T5},
    "mt5": {"only": T5},
    **{
        name: {"only": SEQ2SEQ}
        for name in ("bart", "marian", "blenderbot-small", "pegasus", "mbart", "m2m_100", "blenderbot")
    },
    "whisper": {
        "only": {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
                 "suppress_tokens": None, "begin_suppress_tokens": None},
    },
    "vit": IMAGE,
    "deit": IMAGE,
    "dinov2": IMAGE,
    "clip_vision_model": IMAGE,
    "siglip_vision_model": IMAGE,
    "wav2vec2": {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
                 "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
    "hubert": {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
               "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of a few thousand parameters."""
    special = dict(OVERRIDES.get(model_type, {}))
    values = dict(special.pop("only", COMMON)) | special | changes
    return CONFIG_MAPPING[model_type](**values)


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of `tiny_config`, every weight drawn with standard deviation 0.3, in fp32 and eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    model = model_class({}, config, model_type)(config)
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
    main = model.main_input_name
    if main == "pixel_values":
        return {main: torch.randn(batch, 3, config.image_size, config.image_size, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(batch, 400, generator=generator)}
    if main == "input_features":
        return {
            main: torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator),
            "decoder_input_ids": torch.randint(4, config.vocab_size, (batch, tokens), generator=generator),
        }
    ids = torch.randint(4, config.vocab_size, (batch, tokens), generator=generator)
    if config.is_encoder_decoder:
        decoder = torch.randint(4, config.vocab_size, (batch, tokens), generator=generator)
        return {"input_ids": ids, "decoder_input_ids": decoder}
    return {"input_ids": ids}


def output_of(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """Logits, or the last hidden state of a model without a head, in fp32."""
    with torch.no_grad():
        result = model(**inputs, **more)
    found = getattr(result, "logits", None)
    return (found if found is not None else result.last_hidden_state).float()
