"""Text decoders with a mixture of experts as the feed-forward: every expert writes to the stream."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import EXPERTS, MIXED, outputs, text
from deepen.checkpoint.family import Family, Parts, register

# Patterns cover both the stacked tensors of the module and the single experts of the files.
MIXTURE = Parts(
    outputs=outputs(
        "self_attn.o_proj",
        (
            "mlp.down_proj",
            "mlp.experts.down_proj",
            "mlp.experts.*.down_proj",
            "mlp.shared_expert.down_proj",
            "mlp.shared_experts.down_proj",
            "block_sparse_moe.experts.*.w2",
        ),
    )
)
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    **ROUTED, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

TINIES = {
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "mlp_only_layers": [2], "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [2]},
    "olmoe": EXPERTS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {**MIXED, **ROUTED, "n_group": 1, "topk_group": 1},
}
for name, tiny in TINIES.items():
    register(Family(model_type=name, towers=(text(parts=MIXTURE),), tiny=tiny))
