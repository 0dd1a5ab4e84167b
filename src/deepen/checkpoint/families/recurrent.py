"""State-space models and their hybrids with attention."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import EXPERTS, TINY, outputs, text
from deepen.checkpoint.family import Family, Parts, register

MIXER = Parts(kind="single", mixer=("mixer",), feed_forward=(), outputs={"a": ("mixer.out_proj",), "f": ()})

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
)  # fmt: skip
