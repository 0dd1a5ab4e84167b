"""Text decoders with a mixture of experts as the feed-forward: every expert writes to the stream."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import EXPERTS, MIXED, outputs, text, whole
from deepen.checkpoint.family import Family, Parts, register

# Patterns cover both the stacked tensors of the module and the single experts of the files.
MIXTURE = outputs(
    "self_attn.o_proj",
    (
        "mlp.down_proj",
        "mlp.experts.down_proj",
        "mlp.experts.down_proj_bias",
        "mlp.experts.*.down_proj",
        "mlp.shared_expert.down_proj",
        "mlp.shared_experts.down_proj",
        "mlp.experts.fc2",
        "mlp.shared_mlp.down_proj",
        "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.experts.*.w2",
        "block_sparse_moe.output_linear",
        "shared_mlp.output_linear",
    ),
)
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    **ROUTED, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

SHARED = {**EXPERTS, "num_shared_experts": 1, "shared_expert_intermediate_size": 16}
# Layer 2 is dense as well, where a list can say so.
DENSE = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]}
INDEXED = {**LATENT, **DENSE, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
GRANITE = {**EXPERTS, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}

TINIES = {
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "mlp_only_layers": [2], "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [2]},
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "phimoe": EXPERTS,
    "minimax_m2": EXPERTS,
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "aria_text": {**EXPERTS, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "sarvam_mla": LATENT,
    "axk1": {**LATENT, **DENSE},
    "glm4_moe_lite": {**LATENT, **DENSE},
    "deepseek_v32": INDEXED,
    "axk2": INDEXED,
    "dots1": {**MIXED, **ROUTED, "n_group": 1, "topk_group": 1},
    "glm4_moe": ROUTED,
    "solar_open": ROUTED,
    "ernie4_5_moe": {
        **EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "gpt_oss": {**MIXED, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "afmoe": {**MIXED, **SHARED, "num_dense_layers": 1},
    "exaone_moe": {**MIXED, **SHARED, **DENSE},
    "hy_v3": {**SHARED, **DENSE},
    "laguna": {**MIXED, **SHARED, **DENSE, "num_attention_heads_per_layer": [4, 2, 4, 4, 2, 4]},
    "mellum": {**MIXED, **EXPERTS, **DENSE},
    "kolibri1": {**MIXED, **SHARED},
    "flint": {**MIXED, **SHARED, "mlp_only_layers": [2]},
    "mimo_v2_flash": {**MIXED, **ROUTED, **DENSE, "n_group": 1, "topk_group": 1},
    "granitemoe": GRANITE,
    "granitemoe_swa": {**MIXED, **GRANITE, "layer_rope_theta": [10000.0, 0, 10000.0, 500.0, 0, 500.0]},
}  # fmt: skip
for name, tiny in TINIES.items():
    feed_forward = "block_sparse_moe" if name.startswith("granitemoe") else "mlp"
    parts = Parts(feed_forward=(feed_forward,), outputs=MIXTURE)
    register(Family(model_type=name, towers=(text(parts=parts),), tiny=tiny))

register(
    Family(
        model_type="granitemoeshared",
        towers=(text(parts=Parts(feed_forward=("block_sparse_moe+shared_mlp",), outputs=MIXTURE)),),
        tiny={**GRANITE, "shared_intermediate_size": 16},
    ),
    Family(
        model_type="beam",
        towers=(
            text(
                parts=whole(
                    "it scales the stream by its number", MIXTURE["a"], MIXTURE["f"], post_norm=True
                )
            ),
        ),
        tiny={**MIXED, **EXPERTS, **DENSE, "n_group": 2, "topk_group": 1},
    ),
    Family(
        model_type="sarvam_moe",
        towers=(text(parts=Parts(outputs={**MIXTURE, "a": ("self_attn.o_proj", "attention.dense")})),),
        tiny=ROUTED,
    ),
    Family(
        model_type="cohere2_moe",
        towers=(text(parts=Parts(kind="parallel", outputs=MIXTURE)),),
        tiny={**MIXED, **SHARED, **DENSE},
    ),
    Family(
        model_type="llama4_text",
        towers=(
            text(
                parts=Parts(
                    feed_forward=("feed_forward",),
                    outputs=outputs(
                        "self_attn.o_proj",
                        (
                            "feed_forward.down_proj",
                            "feed_forward.experts.down_proj",
                            "feed_forward.shared_expert.down_proj",
                        ),
                    ),
                    returns={"Llama4TextMoe": 2},
                )
            ),
        ),
        tiny={
            **EXPERTS, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "moe_layers": [1, 3, 4],
            "no_rope_layers": [1, 1, 1, 0, 1, 0], "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"] * 2,
        },
    ),
    Family(
        model_type="jetmoe",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attention",),
                    outputs=outputs(
                        ("self_attention.experts.output_linear", "self_attention.experts.bias"),
                        ("mlp.output_linear", "mlp.bias"),
                    ),
                    returns={"JetMoeAttention": 3},
                )
            ),
        ),
        tiny={**EXPERTS, "kv_channels": 8},
    ),
    Family(
        model_type="dbrx",
        towers=(
            text(
                "blocks",
                "n_layers",
                whole(
                    "its attention adds the residual itself", "norm_attn_norm.attn.out_proj", "ffn.experts.mlp.w2"
                ),
            ),
        ),
        tiny={
            "vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 6, "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Family(
        model_type="minimax_m3_vl_text",
        towers=(text(parts=Parts(outputs=MIXTURE)),),
        tiny={
            **EXPERTS, **DENSE, "dense_intermediate_size": 48, "shared_intermediate_size": 16, "index_n_heads": 2,
            "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"] * 2,
        },
    ),
    Family(
        model_type="inkling_text",
        towers=(text(parts=Parts(outputs={**MIXTURE, "f": (*MIXTURE["f"], "mlp.*.down_proj")})),),
        tiny={
            **EXPERTS, **DENSE, "n_routed_experts": 4, "n_shared_experts": 2, "sliding_window_size": 8,
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
            "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        },
    ),
    Family(
        model_type="deepseek_v4",
        towers=(
            text(
                parts=whole(
                    "it mixes the lanes of its stream around each part", "self_attn.o_b_proj", MIXTURE["f"],
                    post_norm=True,
                )
            ),
        ),
        tiny={
            **LATENT, "sliding_window": 8, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        },
    ),
)  # fmt: skip
