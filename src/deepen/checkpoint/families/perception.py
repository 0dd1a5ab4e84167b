"""Vision and audio encoders."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import POST_NORM, TINY, outputs, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

IMAGE = {**TINY, "image_size": 16, "patch_size": 4}
SOUND = {
    **TINY, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip

for name in "vit deit".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="vision",
                    container="layers",
                    on_disk=(f"{name}.encoder.layer", "encoder.layer"),
                    parts=Parts(
                        mixer=("attention",),
                        outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "output.dense")),
                    ),
                ),
            ),
            tiny=IMAGE,
        )
    )
register(
    Family(
        model_type="dinov2",
        towers=(
            Tower(
                name="vision",
                container="encoder.layer",
                parts=Parts(
                    mixer=("attention",),
                    outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "mlp.weights_out")),
                ),
            ),
        ),
        tiny=IMAGE,
    )
)
for name in "clip_vision_model siglip_vision_model".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="vision",
                    container="encoder.layers",
                    parts=Parts(outputs=outputs("self_attn.out_proj", "mlp.fc2")),
                ),
            ),
            tiny=IMAGE,
        )
    )
for name in "wav2vec2 hubert".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="audio",
                    container="encoder.layers",
                    parts=whole(POST_NORM, "attention.out_proj", "feed_forward.output_dense", post_norm=True),
                ),
            ),
            tiny=SOUND,
        )
    )
