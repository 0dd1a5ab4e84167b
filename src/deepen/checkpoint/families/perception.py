"""Vision encoders."""

from __future__ import annotations

from typing import Any

from deepen.checkpoint.families.shapes import TINY, outputs, torch, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

IMAGE = {**TINY, "image_size": 16, "patch_size": 4}
SAM = {
    **IMAGE,
    "image_size": 32,
    "mlp_dim": 48,
    "window_size": 4,
    "global_attn_indexes": [1, 4],
    "output_channels": 16,
    "num_pos_feats": 8,
}
NO_PART = "its feed-forward is two modules, of which the second adds the residual"
VIT = Parts(
    mixer=("attention",),
    outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "output.dense")),
)
OLD_VIT = whole(NO_PART, "attention.output.dense", "output.dense")
CLIP = Parts(outputs=outputs("self_attn.out_proj", "mlp.fc2"))
DINO = Parts(
    mixer=("attention",),
    outputs=outputs(
        ("attention.o_proj", "attention.output.dense", "attn.proj"),
        ("mlp.fc2", "mlp.weights_out", "mlp.down_proj", "ffn.w3"),
    ),
)


def vision(container: str, parts: Parts, **more: Any) -> tuple[Tower]:
    """The one tower of a vision encoder."""
    return (Tower(name="vision", container=container, parts=parts, **more),)


def pixels(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}


def sided(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, *config.image_size)}


def frames(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, config.num_frames, 3, config.image_size, config.image_size)}


def clip_frames(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"pixel_values_videos": torch.randn(2, config.frames_per_clip, 3, config.crop_size, config.crop_size)}


def unmasked(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Pixels, and the noise by which patches are left out."""
    found = pixels(config, tokens)
    return {**found, "noise": torch.rand(2, (config.image_size // config.patch_size) ** 2)}


def patches(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Pictures of two shapes, cut into patches and padded."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


for name in "vit deit vit_msn ijepa".split():
    register(
        Family(
            model_type=name,
            towers=vision("layers", VIT, on_disk=(f"{name}.encoder.layer", "encoder.layer")),
            tiny=IMAGE,
        )
    )
for name in "dinov2 dinov2_with_registers".split():
    register(Family(model_type=name, towers=vision("encoder.layer", DINO), tiny=IMAGE))
for name in "clip_vision_model siglip_vision_model chinese_clip_vision_model mlcd_vision_model".split():
    register(Family(model_type=name, towers=vision("encoder.layers", CLIP), tiny=IMAGE))

register(
    Family(
        model_type="vit_mae",
        towers=vision("layers", VIT, on_disk=("vit.encoder.layer", "encoder.layer")),
        tiny={**IMAGE, "mask_ratio": 0.5},
        inputs=unmasked,
    ),
    Family(
        model_type="pixio",
        towers=vision("layers", VIT, on_disk=("encoder.layer",)),
        tiny=IMAGE,
    ),
    Family(
        model_type="vivit",
        towers=vision("layers", VIT, on_disk=("vivit.encoder.layer", "encoder.layer")),
        tiny={**IMAGE, "num_frames": 4, "tubelet_size": [2, 4, 4]},
        inputs=frames,
    ),
    Family(
        model_type="beit",
        towers=vision("layers", VIT, on_disk=("beit.encoder.layer", "encoder.layer")),
        tiny={**IMAGE, "use_relative_position_bias": True},
    ),
    Family(
        model_type="data2vec-vision",
        towers=vision("encoder.layer", OLD_VIT),
        tiny={**IMAGE, "use_relative_position_bias": True},
    ),
    Family(
        model_type="dinov3_vit",
        towers=vision("model.layer", DINO, on_disk=("layer",)),
        tiny={**IMAGE, "num_register_tokens": 2},
    ),
    Family(
        model_type="sapiens2",
        towers=vision("model.layer", DINO, on_disk=("blocks",)),
        tiny={**IMAGE, "num_register_tokens": 2},
    ),
    Family(model_type="radio", towers=vision("encoder.layer", DINO, on_disk=("radio_model.model.blocks",)), tiny=IMAGE),
    Family(
        model_type="videomae", towers=vision("encoder.layer", OLD_VIT), tiny={**IMAGE, "num_frames": 4}, inputs=frames
    ),
    Family(
        model_type="timesformer",
        towers=vision(
            "encoder.layer",
            whole("it attends over time and over space", ("attention.output.dense", "temporal_dense"), "output.dense"),
        ),
        tiny={**IMAGE, "num_frames": 3},
        inputs=frames,
    ),
    Family(
        model_type="internvl_vision",
        towers=vision(
            "encoder.layer", Parts(mixer=("attention",), outputs=outputs("attention.projection_layer", "mlp.fc2"))
        ),
        tiny={**IMAGE, "image_size": [16, 16], "patch_size": [4, 4]},
        inputs=sided,
    ),
    Family(
        model_type="aimv2_vision_model",
        towers=vision(
            "encoder.layers",
            Parts(mixer=("attention",), feed_forward=("ffn",), outputs=outputs("attention.out_proj", "ffn.down_proj")),
        ),
        tiny=IMAGE,
    ),
    Family(
        model_type="pixtral",
        towers=vision(
            "transformer.layers",
            Parts(
                mixer=("attention",),
                feed_forward=("feed_forward",),
                outputs=outputs("attention.o_proj", "feed_forward.down_proj"),
            ),
        ),
        tiny=IMAGE,
    ),
    Family(
        model_type="siglip2_vision_model",
        towers=vision("encoder.layers", CLIP),
        tiny={**IMAGE, "num_patches": 16},
        inputs=patches,
    ),
    Family(model_type="idefics3_vision", towers=vision("encoder.layers", CLIP), tiny=IMAGE, inputs=pixels),
    Family(
        model_type="sam_vision_model",
        towers=vision("layers", Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.lin2"))),
        tiny=SAM,
    ),
    Family(
        model_type="sam3_vit_model",
        towers=vision("layers", VIT),
        tiny={**IMAGE, "image_size": 32, "pretrain_image_size": 32, "window_size": 4, "global_attn_indexes": [1, 4]},
    ),
    Family(
        model_type="vitdet",
        towers=vision(
            "encoder.layer",
            whole("a residual block may follow its two parts", "attention.proj", ("mlp.fc2", "residual.norm3")),
        ),
        tiny={
            **IMAGE,
            "image_size": 32,
            "window_size": 4,
            "window_block_indices": [0, 1, 3, 4],
            "residual_block_indices": [2],
            "drop_path_rate": 0.0,
            "use_relative_position_embeddings": True,
        },
    ),
    Family(
        model_type="vjepa2",
        towers=vision("encoder.layer", Parts(mixer=("attention",), outputs=outputs("attention.proj", "mlp.fc2"))),
        tiny={
            **IMAGE,
            "crop_size": 16,
            "frames_per_clip": 4,
            "tubelet_size": 2,
            "pred_hidden_size": 32,
            "pred_num_hidden_layers": 2,
            "pred_num_attention_heads": 4,
            "mlp_ratio": 2,
        },
        inputs=clip_frames,
    ),
)


def prompted(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Pictures, and a point in each that is to be cut out."""
    size = config.vision_config.image_size
    return {
        "pixel_values": torch.randn(2, 3, size, size),
        "input_points": torch.tensor([[[[9.0, 12.0]]], [[[20.0, 4.0]]]]),
    }


# The decoder of masks has two streams, so only the vision encoder is a tower.
register(
    Family(
        model_type="sam",
        towers=vision(
            "vision_encoder.layers",
            Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.lin2")),
            depth="vision_config.num_hidden_layers",
        ),
        tiny={
            "vision_config": SAM,
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 24,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
                "vit_dim": 32,
            },
        },
        inputs=prompted,
    )
)
