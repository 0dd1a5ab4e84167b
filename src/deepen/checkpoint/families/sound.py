"""Audio encoders."""

from __future__ import annotations

from typing import Any

from deepen.checkpoint.families.shapes import POST_NORM, TINY, outputs, torch, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

SOUND = {
    **TINY, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
LASR = {
    **TINY, "num_key_value_heads": 4, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3,
    "layerdrop": 0.0,
}  # fmt: skip
POST = whole(POST_NORM, "attention.out_proj", "feed_forward.output_dense", post_norm=True)
PRE = Parts(
    mixer=("attention",),
    feed_forward=("feed_forward",),
    outputs=outputs("attention.out_proj", "feed_forward.output_dense"),
)
MACARON = whole(
    "it has two feed-forwards, a convolution and a norm at its end",
    ("self_attn.linear_out", "self_attn.o_proj", "conv_module.pointwise_conv2", "conv.pointwise_conv2"),
    ("ffn1.output_dense", "ffn2.output_dense", "feed_forward1.linear2", "feed_forward2.linear2"),
    post_norm=True,
)


def audio(container: str, parts: Parts, **more: Any) -> tuple[Tower]:
    """The one tower of an audio encoder."""
    return (Tower(name="audio", container=container, parts=parts, **more),)


def spectrum(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}


def bands(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 20, config.feature_projection_input_dim)}


def mel(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 40, config.num_mel_bins)}


def waves(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 1, 400)}


def nested_mel(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return mel(config.encoder_config, tokens)


for name in "wav2vec2 hubert unispeech unispeech-sat".split():
    register(Family(model_type=name, towers=audio("encoder.layers", POST), tiny=SOUND))

register(
    Family(
        model_type="data2vec-audio",
        towers=audio("encoder.layers", POST),
        tiny={**SOUND, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    ),
    Family(model_type="sew", towers=audio("encoder.layers", POST), tiny={**SOUND, "squeeze_factor": 2}),
    Family(
        model_type="sew-d",
        towers=audio(
            "encoder.encoder.layer", whole(POST_NORM, "attention.output.dense", "output.dense", post_norm=True)
        ),
        tiny={**SOUND, "squeeze_factor": 2, "position_buckets": 4, "max_position_embeddings": 16},
    ),
    Family(
        model_type="wavlm",
        towers=audio("encoder.layers", POST, first=("attention.rel_attn_embed.weight",)),
        tiny={**SOUND, "num_buckets": 8, "max_bucket_distance": 16},
    ),
    Family(
        model_type="wav2vec2-conformer",
        towers=audio("encoder.layers", MACARON),
        tiny={
            **SOUND,
            "position_embeddings_type": "relative",
            "conv_depthwise_kernel_size": 3,
            "max_source_positions": 64,
        },
    ),
    Family(
        model_type="wav2vec2-bert",
        towers=audio("encoder.layers", MACARON),
        tiny={
            **TINY,
            "feature_projection_input_dim": 10,
            "layerdrop": 0.0,
            "position_embeddings_type": "relative_key",
            "left_max_position_embeddings": 4,
            "right_max_position_embeddings": 2,
            "conv_depthwise_kernel_size": 3,
        },
        inputs=bands,
    ),
    Family(
        model_type="audio-spectrogram-transformer",
        towers=audio(
            "layers",
            Parts(
                mixer=("attention",),
                outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "output.dense")),
            ),
            on_disk=("audio_spectrogram_transformer.encoder.layer", "encoder.layer"),
        ),
        tiny={**TINY, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        inputs=spectrum,
    ),
    Family(
        model_type="lasr_encoder",
        towers=audio("layers", MACARON),
        tiny=LASR,
        inputs=mel,
    ),
    Family(
        model_type="lasr_ctc",
        towers=audio("encoder.layers", MACARON, depth="encoder_config.num_hidden_layers"),
        tiny={"vocab_size": 96, "pad_token_id": 0, "encoder_config": LASR},
        inputs=nested_mel,
    ),
    Family(
        model_type="parakeet_ctc",
        towers=audio("encoder.layers", MACARON, depth="encoder_config.num_hidden_layers"),
        tiny={"vocab_size": 96, "pad_token_id": 0, "encoder_config": LASR},
        inputs=nested_mel,
    ),
)
register(
    Family(
        model_type="omniasr_ctc",
        towers=audio("audio_tower.layers", PRE, depth="audio_config.num_hidden_layers"),
        tiny={"vocab_size": 96, "pad_token_id": 0, "audio_config": SOUND},
        inputs=waves,
    ),
)
