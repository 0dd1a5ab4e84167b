"""Text decoders with one dense feed-forward a layer."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import MIXED, NO_MODULE, SLIDING, TINY, outputs, text, whole
from deepen.checkpoint.family import Family, Parts, register

GPT = {
    "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PARALLEL = Parts(kind="parallel")

# In the shape of Llama: x + self_attn(norm x), then x + mlp(norm x).
for (
    name
) in "llama qwen3 gemma olmo olmo2 granite helium glm glm4 arcee seed_oss nemotron ernie4_5 hunyuan_v1_dense".split():
    register(Family(model_type=name, towers=(text(),), tiny=TINY))
for name in "gemma2 gemma3_text olmo3 ministral exaone4".split():
    register(Family(model_type=name, towers=(text(),), tiny=MIXED))
for name in "mistral phi3".split():
    register(Family(model_type=name, towers=(text(),), tiny=SLIDING))

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
)  # fmt: skip
