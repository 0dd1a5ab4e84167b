"""Encoder-decoders: two towers, each with its own depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepen.checkpoint.families.shapes import ADDS_ITSELF, MIXED, NO_MODULE, Names, outputs, torch, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

Inputs = Callable[[Any, int], dict[str, Any]]

# The first block executed computes the bias that the others reuse.
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 4, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip

CROSS = "between its two parts a layer attends to the encoder"


def decoded(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": torch.randint(4, config.vocab_size, (2, tokens))}


def long_source(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """A source longer than the windows and blocks of the encoder."""
    return {"input_ids": torch.randint(4, config.vocab_size, (2, 2 * tokens + 4)), **decoded(config, tokens)}


def global_source(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """A long source whose first token attends globally."""
    found = long_source(config, tokens)
    first = torch.zeros_like(found["input_ids"])
    first[:, 0] = 1
    return {**found, "global_attention_mask": first}


def languages(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, config.src_vocab_size, (2, tokens)), **decoded(config, tokens)}


def wave(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 1200), **decoded(config, tokens)}


def filter_bank(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    width = config.input_feat_per_channel * config.input_channels
    return {"input_features": torch.randn(2, 32, width), **decoded(config, tokens)}


def t5_like(
    model_type: str,
    attention: tuple[str, ...] = ("SelfAttention",),
    ffn: Names = "DenseReluDense.wo",
    first: tuple[str, ...] = (BIAS,),
    tiny: Mapping[str, Any] = T5,
    inputs: Inputs | None = None,
) -> Family:
    """A family in the shape of T5: blocks of two or three sublayers."""
    writes = (ffn,) if isinstance(ffn, str) else ffn
    return Family(
        model_type=model_type,
        towers=(
            Tower(
                name="encoder",
                container="encoder.block",
                depth="num_layers",
                first=tuple(name.replace("SelfAttention", kind) for kind in attention for name in first),
                parts=whole(
                    ADDS_ITSELF,
                    tuple(f"layer.0.{kind}.o" for kind in attention),
                    tuple(f"layer.1.{name}" for name in writes),
                ),
            ),
            Tower(
                name="decoder",
                container="decoder.block",
                depth="num_decoder_layers",
                live=("num_layers", "num_decoder_layers"),
                caches=True,
                first=first,
                parts=whole(
                    ADDS_ITSELF,
                    ("layer.0.SelfAttention.o", "layer.1.EncDecAttention.o"),
                    tuple(f"layer.2.{name}" for name in writes),
                ),
            ),
        ),
        tiny=tiny,
        inputs=inputs,
    )


for name in "t5 mt5 pop2piano".split():
    register(t5_like(name))
register(
    t5_like("umt5", first=()),
    t5_like(
        "longt5",
        ("LocalSelfAttention", "TransientGlobalSelfAttention"),
        first=(BIAS, BIAS.replace("relative", "global_relative")),
        tiny={**T5, "encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 4},
        inputs=long_source,
    ),
    t5_like(
        "switch_transformers",
        ffn=("mlp.wo", "mlp.experts.*.wo"),
        tiny={
            **T5, "num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0,
        },
    ),
)  # fmt: skip


def bart_like(
    model_type: str,
    *,
    post_norm: bool,
    tiny: Mapping[str, Any] = BART,
    encoder: Names = "self_attn.out_proj",
    encoder_lists: tuple[str, ...] = (),
    inputs: Inputs | None = None,
) -> Family:
    """A family in the shape of BART: fc1 and fc2 lie in the layer itself."""
    return Family(
        model_type=model_type,
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder_layers",
                parts=whole(NO_MODULE, encoder, "fc2", post_norm=post_norm),
            ),
            Tower(
                name="decoder",
                container="decoder.layers",
                depth="decoder_layers",
                caches=True,
                foreign=encoder_lists,
                parts=whole(NO_MODULE, ("self_attn.out_proj", "encoder_attn.out_proj"), "fc2", post_norm=post_norm),
            ),
        ),
        tiny=tiny,
        inputs=inputs,
    )


for name in "bart marian blenderbot-small plbart mvp".split():
    register(bart_like(name, post_norm=True))
for name in "pegasus mbart m2m_100 blenderbot".split():
    register(bart_like(name, post_norm=False))
register(
    bart_like("whisper", post_norm=False, tiny=WHISPER),
    bart_like(
        "led",
        post_norm=True,
        tiny={
            **BART, "attention_window": [4, 8, 4, 8], "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        encoder="self_attn.output",
        encoder_lists=("attention_window",),
        inputs=global_source,
    ),
    bart_like(
        "bigbird_pegasus",
        post_norm=False,
        tiny={**BART, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
        encoder="self_attn.output",
        inputs=long_source,
    ),
    bart_like(
        "fsmt",
        post_norm=True,
        tiny={**BART, "langs": ["en", "de"], "src_vocab_size": 90, "tgt_vocab_size": 96},
        inputs=languages,
    ),
    bart_like(
        "speech_to_text",
        post_norm=False,
        tiny={
            **BART, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "num_conv_layers": 2,
            "conv_kernel_sizes": [3, 3], "max_source_positions": 64, "max_target_positions": 64,
        },
        inputs=filter_bank,
    ),
    Family(
        model_type="nllb-moe",
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder_layers",
                parts=whole(
                    ADDS_ITSELF, "self_attn.out_proj", ("ffn.fc2", "ffn.experts.*.fc2", "ffn.experts.down_proj")
                ),
            ),
            Tower(
                name="decoder",
                container="decoder.layers",
                depth="decoder_layers",
                caches=True,
                parts=whole(
                    CROSS,
                    ("self_attn.out_proj", "cross_attention.out_proj"),
                    ("ffn.fc2", "ffn.experts.*.fc2", "ffn.experts.down_proj"),
                ),
            ),
        ),
        tiny={
            **BART, "num_experts": 4, "expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
            "moe_token_dropout": 0.0,
        },
    ),
    Family(
        model_type="moonshine",
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder_num_hidden_layers",
                parts=Parts(outputs=outputs("self_attn.o_proj", "mlp.fc2")),
            ),
            Tower(
                name="decoder",
                container="decoder.layers",
                depth="decoder_num_hidden_layers",
                caches=True,
                parts=whole(CROSS, ("self_attn.o_proj", "encoder_attn.o_proj"), "mlp.fc2"),
            ),
        ),
        tiny={
            "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 4,
            "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64, "decoder_start_token_id": 1, "pad_token_id": 0,
        },
        inputs=wave,
    ),
    Family(
        model_type="t5gemma",
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder.num_hidden_layers",
                parts=Parts(outputs=outputs("self_attn.o_proj", "mlp.down_proj")),
            ),
            Tower(
                name="decoder",
                container="decoder.layers",
                depth="decoder.num_hidden_layers",
                caches=True,
                parts=whole(CROSS, ("self_attn.o_proj", "cross_attn.o_proj"), "mlp.down_proj"),
            ),
        ),
        tiny={"vocab_size": 96, "encoder": MIXED, "decoder": MIXED, "decoder_start_token_id": 1},
    ),
)  # fmt: skip
