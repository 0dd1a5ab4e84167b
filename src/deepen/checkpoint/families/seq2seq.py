"""Encoder-decoders: two towers, each with its own depth."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import ADDS_ITSELF, NO_MODULE, whole
from deepen.checkpoint.family import Family, Tower, register

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

for name in "t5 mt5".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="encoder",
                    container="encoder.block",
                    depth="num_layers",
                    first=(BIAS,),
                    parts=whole(ADDS_ITSELF, "layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
                ),
                Tower(
                    name="decoder",
                    container="decoder.block",
                    depth="num_decoder_layers",
                    live=("num_layers", "num_decoder_layers"),
                    caches=True,
                    first=(BIAS,),
                    parts=whole(
                        ADDS_ITSELF,
                        ("layer.0.SelfAttention.o", "layer.1.EncDecAttention.o"),
                        "layer.2.DenseReluDense.wo",
                    ),
                ),
            ),
            tiny=T5,
        )
    )


def bart_like(model_type: str, *, post_norm: bool, tiny: dict[str, object] | None = None) -> Family:
    """A family in the shape of BART: fc1 and fc2 lie in the layer itself."""
    return Family(
        model_type=model_type,
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder_layers",
                parts=whole(NO_MODULE, "self_attn.out_proj", "fc2", post_norm=post_norm),
            ),
            Tower(
                name="decoder",
                container="decoder.layers",
                depth="decoder_layers",
                caches=True,
                parts=whole(NO_MODULE, ("self_attn.out_proj", "encoder_attn.out_proj"), "fc2", post_norm=post_norm),
            ),
        ),
        tiny=tiny or BART,
    )


for name in "bart marian blenderbot-small".split():
    register(bart_like(name, post_norm=True))
for name in "pegasus mbart m2m_100 blenderbot".split():
    register(bart_like(name, post_norm=False))
register(bart_like("whisper", post_norm=False, tiny=WHISPER))
