"""Text decoders that feed an embedding of its own into each layer, and share keys and values between layers."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import SLIDING, text, whole
from deepen.checkpoint.family import Family, Slab, register

EMBEDDINGS = (
    Slab(name="embed_tokens_per_layer.weight", axis=1),
    Slab(name="per_layer_model_projection.weight", axis=0),
)
FED = "an embedding of its own and factors change the stream outside its parts"
PER_LAYER = {
    **SLIDING,
    # Loading zeroes the embedding of the padding token, which a random model does not.
    "pad_token_id": None,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
# The last two layers reuse the keys and values of layers 2 and 3.
SHARING = {**PER_LAYER, "num_kv_shared_layers": 2}

register(
    Family(
        model_type="gemma3n_text",
        towers=(text(parts=whole(FED, "self_attn.o_proj", "mlp.down_proj", post_norm=True), slabs=EMBEDDINGS),),
        tiny={
            **SHARING,
            "intermediate_size": [48, 48, 32, 48, 48, 64],
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "laurel_rank": 4,
        },
    ),
    Family(
        model_type="gemma4_text",
        towers=(
            text(
                parts=whole(FED, "self_attn.o_proj", "mlp.down_proj", post_norm=True),
                slabs=EMBEDDINGS,
                neutral={"first_kv_shared_layer_idx": None},
            ),
        ),
        tiny={**SHARING, "use_double_wide_mlp": True, "global_head_dim": 16},
    ),
)
