"""State-space models and their hybrids with attention."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import EXPERTS, TINY, outputs, text, whole
from deepen.checkpoint.family import Family, Parts, register

LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
CONV = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"] * 2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16, "num_shared_experts": 1}
# Gated delta networks between layers of full attention; the feed-forward is dense or a mixture of experts.
DELTA = Parts(
    mixer=("self_attn", "linear_attn"),
    outputs=outputs(
        ("self_attn.o_proj", "linear_attn.out_proj", "linear_attn.o_proj", "attention.dense"),
        (
            "mlp.down_proj", "mlp.experts.down_proj", "mlp.experts.*.down_proj", "mlp.shared_expert.down_proj",
            "mlp.shared_experts.down_proj",
            "block_sparse_moe.down_proj",
            "block_sparse_moe.experts.*.w2",
            "block_sparse_moe.experts.*.down_proj",
            "block_sparse_moe.shared_experts.down_proj",
        ),
    ),
)  # fmt: skip
SHORT = Parts(
    mixer=("self_attn", "conv"),
    feed_forward=("feed_forward",),
    outputs=outputs(
        ("self_attn.out_proj", "self_attn.o_proj", "conv.out_proj"),
        ("feed_forward.w2", "feed_forward.experts.down_proj", "feed_forward.experts.*.w2"),
    ),
    # Its annotation says a tuple.
    returns={"Lfm2MoeSparseMoeBlock": 1},
)
MIXER = Parts(kind="single", mixer=("mixer",), feed_forward=(), outputs={"a": ("mixer.out_proj",), "f": ()})

TINIES = {
    "qwen3_5_text": {**TINY, **LINEAR},
    "olmo_hybrid": {**TINY, **LINEAR},
    "qwen3_next": {**SHARED, **LINEAR, "mlp_only_layers": [2]},
    "qwen3_5_moe_text": {**SHARED, **LINEAR},
    "lara_mini": {
        **SHARED, **LINEAR, "sliding_window": 8,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"] * 2,
    },
    "kimi_linear": {
        **SHARED, "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"], "linear_head_dim": 8,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "num_expert_group": 1, "topk_group": 1,
        "num_experts_per_token": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
TINIES["bailing_hybrid"] = {**TINIES["kimi_linear"], "num_expert_group": 2, "short_conv_kernel_size": 3}
for name, tiny in TINIES.items():
    register(Family(model_type=name, towers=(text(parts=DELTA),), tiny=tiny))
for name, tiny in {
    "lfm2": {**TINY, **CONV},
    "lfm2_moe": {**EXPERTS, **CONV, "num_dense_layers": 1},
    "lfm3": {**TINY, **CONV, "layer_types": ["conv", "full_attention", "sliding_attention"] * 2, "sliding_window": 8},
}.items():
    register(Family(model_type=name, towers=(text(parts=SHORT),), tiny=tiny))
for name in "mamba falcon_mamba".split():
    register(Family(model_type=name, towers=(text(parts=MIXER),), tiny={**TINY, "state_size": 8, "time_step_rank": 4}))
register(
    Family(
        model_type="mamba2",
        towers=(text(parts=MIXER),),
        tiny={**TINY, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    Family(
        model_type="jamba",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attn", "mamba"),
                    feed_forward=("feed_forward",),
                    outputs=outputs(
                        ("self_attn.o_proj", "mamba.out_proj"),
                        (
                            "feed_forward.down_proj",
                            "feed_forward.experts.down_proj",
                            "feed_forward.experts.*.down_proj",
                        ),
                    ),
                )
            ),
        ),
        tiny={
            **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    Family(
        model_type="bamba",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attn", "mamba"),
                    feed_forward=("feed_forward",),
                    outputs=outputs(("self_attn.o_proj", "mamba.out_proj"), "feed_forward.down_proj"),
                )
            ),
        ),
        tiny={**TINY, **MAMBA, "attn_layer_indices": [1, 4]},
    ),
    Family(
        model_type="falcon_h1",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attn+mamba",),
                    feed_forward=("feed_forward",),
                    outputs=outputs(("self_attn.o_proj", "mamba.out_proj"), "feed_forward.down_proj"),
                )
            ),
        ),
        tiny={**TINY, **MAMBA, "mamba_d_ssm": 64, "attention_in_multiplier": 0.5, "ssm_out_multiplier": 2.0},
    ),
    Family(
        model_type="granitemoehybrid",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attn", "mamba"),
                    feed_forward=("block_sparse_moe+shared_mlp", "shared_mlp"),
                    outputs=outputs(
                        ("self_attn.o_proj", "mamba.out_proj"),
                        (
                            "block_sparse_moe.experts.down_proj",
                            "block_sparse_moe.output_linear",
                            "shared_mlp.output_linear",
                        ),
                    ),
                )
            ),
        ),
        tiny={
            **EXPERTS, **MAMBA, "shared_intermediate_size": 16, "residual_multiplier": 0.5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
        },
    ),
    Family(
        model_type="nemotron_h",
        towers=(
            text(
                parts=Parts(
                    kind="single",
                    mixer=("mixer",),
                    feed_forward=(),
                    outputs={
                        "a": (
                            "mixer.out_proj", "mixer.o_proj", "mixer.down_proj", "mixer.experts.down_proj",
                            "mixer.experts.*.down_proj", "mixer.shared_experts.down_proj",
                        ),
                        "f": (),
                    },
                ),
                on_disk=("backbone.layers",),
            ),
        ),
        tiny={
            **EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "use_mamba_kernels": False,
        },
    ),
    Family(
        model_type="minimax",
        towers=(
            text(
                parts=whole(
                    "it normalises the stream itself and scales it",
                    ("self_attn.o_proj", "self_attn.out_proj"),
                    ("mlp.experts.down_proj", "block_sparse_moe.experts.*.w2", "mlp.experts.*.w2"),
                    post_norm=True,
                )
            ),
        ),
        tiny={
            **EXPERTS, "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2, "block_size": 8,
        },
    ),
)  # fmt: skip
