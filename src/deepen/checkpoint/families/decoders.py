"""Text decoders with one dense feed-forward a layer."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import MIXED, NO_MODULE, POST_NORM, SLIDING, TINY, outputs, text, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

GPT = {
    "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PARALLEL = Parts(kind="parallel")
SCALED_STREAM = whole(
    "it multiplies the stream by learned vectors between its parts", "self_attn.o_proj", "mlp.down_proj", post_norm=True
)
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip

# In the shape of Llama: x + self_attn(norm x), then x + mlp(norm x).
LIKE_LLAMA = (
    "llama qwen3 gemma olmo olmo2 granite helium glm glm4 arcee seed_oss nemotron ernie4_5 hunyuan_v1_dense apertus "
    "apertus1p5_text bitnet diffllama internlm3 iquestcoder jais2"
)
for name in LIKE_LLAMA.split():
    register(Family(model_type=name, towers=(text(),), tiny=TINY))
for name in "gemma2 gemma3_text olmo3 ministral exaone4 cwm vaultgemma".split():
    register(Family(model_type=name, towers=(text(),), tiny=MIXED))
for name in "mistral ministral3 phi3".split():
    register(Family(model_type=name, towers=(text(),), tiny=SLIDING))
# Keys and values expanded from a latent vector.
for name in "minicpm3 youtu".split():
    # Loading zeroes the embedding of the padding token, which a random model does not.
    register(Family(model_type=name, towers=(text(),), tiny={**TINY, **LATENT, "pad_token_id": None}))

register(
    Family(model_type="qwen2", towers=(text(),), tiny={**MIXED, "use_sliding_window": True}),
    Family(model_type="smollm3", towers=(text(),), tiny={**TINY, "no_rope_layers": [1, 1, 1, 0, 1, 1]}),
    Family(model_type="stablelm", towers=(text(),), tiny=TINY),
    Family(model_type="cohere", towers=(text(parts=PARALLEL),), tiny=TINY),
    Family(model_type="cohere2", towers=(text(parts=PARALLEL),), tiny=MIXED),
    Family(
        model_type="starcoder2",
        towers=(text(parts=Parts(outputs=outputs("self_attn.o_proj", "mlp.c_proj"))),),
        tiny=SLIDING,
    ),
    Family(
        model_type="phi",
        towers=(text(parts=Parts(kind="parallel", outputs=outputs("self_attn.dense", "mlp.fc2"))),),
        tiny=TINY,
    ),
    Family(
        model_type="persimmon",
        towers=(text(parts=Parts(outputs=outputs("self_attn.dense", "mlp.dense_4h_to_h"))),),
        tiny=TINY,
    ),
    Family(
        model_type="gpt_neox",
        towers=(
            text(
                parts=Parts(
                    kind="parallel", mixer=("attention",), outputs=outputs("attention.dense", "mlp.dense_4h_to_h")
                )
            ),
        ),
        tiny=TINY,
    ),
    Family(
        model_type="gpt2",
        towers=(text("h", "n_layer", Parts(mixer=("attn",), outputs=outputs("attn.c_proj", "mlp.c_proj"))),),
        folds_index={"scale_attn_by_inverse_layer_idx": "attn.c_attn"},
        tiny=GPT,
    ),
    Family(
        model_type="gptj",
        towers=(
            text(
                "h",
                "n_layer",
                Parts(kind="parallel", mixer=("attn",), outputs=outputs("attn.out_proj", "mlp.fc_out")),
            ),
        ),
        tiny={**GPT, "rotary_dim": 4},
    ),
    Family(
        model_type="gpt_neo",
        towers=(
            text(
                "h", "num_layers", Parts(mixer=("attn",), outputs=outputs("attn.attention.out_proj", "mlp.c_proj"))
            ),
        ),
        tiny={
            "vocab_size": 96, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "intermediate_size": 48,
            "max_position_embeddings": 64, "window_size": 8, "attention_types": [[["global", "local"], 3]],
            "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    Family(
        model_type="bloom",
        towers=(
            text(
                "h",
                "n_layer",
                whole(
                    "its attention and feed-forward add the residual themselves",
                    "self_attention.dense",
                    "mlp.dense_4h_to_h",
                ),
            ),
        ),
        tiny={"vocab_size": 96, "hidden_size": 32, "n_layer": 6, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        model_type="falcon",
        towers=(
            text(
                "h",
                parts=Parts(
                    kind="parallel",
                    mixer=("self_attention",),
                    outputs=outputs("self_attention.dense", "mlp.dense_4h_to_h"),
                ),
            ),
        ),
        tiny={
            "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_kv_heads": 2,
            "ffn_hidden_size": 48, "new_decoder_architecture": True, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    Family(
        model_type="opt",
        towers=(text(parts=whole(NO_MODULE, "self_attn.out_proj", "fc2")),),
        tiny={**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    Family(
        model_type="granite_swa",
        towers=(text(),),
        tiny={
            **MIXED, "layer_rope_theta": [10000.0, 0, 10000.0, 500.0, 0, 500.0], "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    Family(
        model_type="exaone",
        towers=(
            text(
                parts=Parts(
                    outputs=outputs(
                        ("self_attn.o_proj", "attn.attention.out_proj"), ("mlp.down_proj", "mlp.c_proj")
                    )
                ),
                on_disk=("transformer.h",),
            ),
        ),
        tiny=TINY,
    ),
    Family(
        model_type="doge",
        towers=(text(parts=SCALED_STREAM),),
        # Longer than the test: past it the model's own cached pass differs from the uncached one.
        tiny={**TINY, "keep_window_size": 16},
    ),
    Family(
        model_type="ctrl",
        towers=(
            text(
                "h",
                "n_layer",
                Parts(
                    mixer=("multi_head_attention",),
                    feed_forward=("ffn",),
                    outputs=outputs("multi_head_attention.dense", "ffn.2"),
                    returns={"MultiHeadAttention": 2},
                ),
            ),
        ),
        tiny={**GPT, "dff": 48},
    ),
    Family(
        model_type="openai-gpt",
        towers=(
            Tower(
                name="text",
                container="h",
                depth="n_layer",
                parts=whole(POST_NORM, "attn.c_proj", "mlp.c_proj", post_norm=True),
            ),
        ),
        tiny=GPT,
    ),
    Family(
        model_type="biogpt",
        towers=(text(parts=whole(NO_MODULE, "self_attn.out_proj", "fc2")),),
        tiny=TINY,
    ),
    Family(
        model_type="xglm",
        towers=(text(depth="num_layers", parts=whole(NO_MODULE, "self_attn.out_proj", "fc2")),),
        tiny={
            "vocab_size": 96, "d_model": 32, "ffn_dim": 48, "num_layers": 6, "attention_heads": 4, "bos_token_id": 1,
            "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2,
        },
    ),
    Family(
        model_type="codegen",
        towers=(
            text(
                "h", "n_layer", Parts(kind="parallel", mixer=("attn",), outputs=outputs("attn.out_proj", "mlp.fc_out"))
            ),
        ),
        tiny={**GPT, "rotary_dim": 4},
    ),
    Family(
        model_type="gpt_bigcode",
        towers=(text("h", "n_layer", Parts(mixer=("attn",), outputs=outputs("attn.c_proj", "mlp.c_proj"))),),
        tiny=GPT,
    ),
    Family(
        model_type="mpt",
        towers=(
            text(
                "blocks",
                "n_layers",
                whole("its feed-forward adds the residual itself", "attn.out_proj", "ffn.down_proj"),
            ),
        ),
        tiny={"vocab_size": 96, "d_model": 32, "n_layers": 6, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
    ),
    Family(
        model_type="gpt_neox_japanese",
        towers=(
            text(
                parts=Parts(
                    mixer=("attention",),
                    outputs=outputs(("attention.dense", "attention.dense_bias"), "mlp.dense_4h_to_h"),
                    returns={"GPTNeoXJapaneseAttention": 3},
                )
            ),
        ),
        tiny={**TINY, "intermediate_multiple_size": 2},
    ),
    Family(
        model_type="hyperclovax",
        towers=(text(),),
        tiny={**TINY, "use_post_norm": True, "residual_multiplier": 0.5},
    ),
    Family(
        model_type="nanochat",
        towers=(text(parts=Parts(outputs=outputs("self_attn.o_proj", "mlp.fc2"))),),
        tiny=TINY,
    ),
)  # fmt: skip
