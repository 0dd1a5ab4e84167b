"""Models that see: a vision tower and a text tower, each with a config of its own inside the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepen.checkpoint.families.shapes import MIXED, TINY, outputs, text
from deepen.checkpoint.family import Family, Parts, Tower, register

IMAGE_TOKEN = 90
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
CLIP = Parts(outputs=outputs("self_attn.out_proj", "mlp.fc2"))


def picture(count: int) -> Callable[[Any, int], dict[str, Any]]:
    """Inputs of one picture a sample, 16 x 16 pixels, standing for `count` tokens at the front of the text."""

    def inputs(config: Any, tokens: int) -> dict[str, Any]:
        import torch

        words = torch.randint(4, 80, (2, tokens))
        places = torch.full((2, count), IMAGE_TOKEN)
        return {"input_ids": torch.cat([places, words], 1), "pixel_values": torch.randn(2, 3, 16, 16)}

    return inputs


def seeing(
    model_type: str,
    vision: Tower,
    tiny: Mapping[str, Any],
    count: int,
    *,
    feature: str = "",
    text_parts: Parts | None = None,
) -> Family:
    """A family with one text and one vision tower, and a picture of `count` tokens."""
    return Family(
        model_type=model_type,
        towers=(
            text("language_model.layers", "text_config.num_hidden_layers", text_parts, on_disk=TEXT_ON_DISK),
            vision,
        ),
        tiny=tiny,
        features={feature: "vision"} if feature else {},
        inputs=picture(count),
    )


TEXT_ON_DISK = ("language_model.model.layers", "model.language_model.layers", "model.text_model.layers", "model.layers")


def clip_tower(container: str, *prefixes: str) -> Tower:
    return Tower(
        name="vision",
        container=container,
        depth="vision_config.num_hidden_layers",
        parts=CLIP,
        on_disk=prefixes,
    )


LLAVA = {
    "text_config": {**TINY, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "image_token_index": IMAGE_TOKEN,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}

register(
    seeing(
        "llava",
        clip_tower("vision_tower.encoder.layers", "vision_tower.vision_model.encoder.layers"),
        {**LLAVA, "vision_feature_layer": -2},
        16,
        feature="vision_feature_layer",
    ),
    seeing(
        "gemma3",
        clip_tower("vision_tower.encoder.layers", "vision_tower.vision_model.encoder.layers"),
        {
            "text_config": {**MIXED, "model_type": "gemma3_text"},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
        4,
    ),
    seeing(
        "paligemma",
        clip_tower("vision_tower.encoder.layers", "vision_tower.vision_model.encoder.layers"),
        {
            "text_config": {**TINY, "model_type": "gemma"},
            "vision_config": {**SIGLIP, "projection_dim": 32},
            "projection_dim": 32,
            "image_token_index": IMAGE_TOKEN,
        },
        16,
    ),
    seeing(
        "aya_vision",
        clip_tower("vision_tower.encoder.layers", "vision_tower.vision_model.encoder.layers"),
        {
            "text_config": {**MIXED, "model_type": "cohere2"},
            "vision_config": SIGLIP,
            "image_token_index": IMAGE_TOKEN,
            "downsample_factor": 2,
            "vision_feature_layer": -1,
        },
        4,
        feature="vision_feature_layer",
        text_parts=Parts(kind="parallel"),
    ),
)


def patches(config: Any, tokens: int) -> dict[str, Any]:
    """Inputs of one picture a sample as Qwen's processors give it: a row a patch, and the grid of patches."""
    import torch

    vision = config.vision_config
    side = 2 * vision.spatial_merge_size
    words = torch.randint(4, 80, (2, tokens))
    front = torch.tensor([[VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]] * 2)
    ids = torch.cat([front, words], 1)
    length = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2 * side * side, length),
        "image_grid_thw": torch.tensor([[1, side, side]] * 2),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


VISION_START, VISION_END = 91, 92
QWEN_TEXT = {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 93,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
QWEN_ON_DISK = ("model.layers", "model.language_model.layers")
BLOCKS_ON_DISK = ("visual.blocks", "model.visual.blocks")
QWEN_VISION = {
    "qwen2_vl": (
        Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.fc2")),
        {"depth": 4, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
    ),
    "qwen2_5_vl": (
        Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.down_proj")),
        {
            "depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4,
            "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1, 3],
        },
    ),
}  # fmt: skip
for name, (parts, vision) in QWEN_VISION.items():
    register(
        Family(
            model_type=name,
            towers=(
                text("language_model.layers", "text_config.num_hidden_layers", on_disk=QWEN_ON_DISK),
                Tower(
                    name="vision", container="visual.blocks", depth="vision_config.depth", parts=parts,
                    on_disk=BLOCKS_ON_DISK,
                ),
            ),
            tiny={**QWEN, "text_config": QWEN_TEXT, "vision_config": vision},
            inputs=patches,
        )
    )  # fmt: skip
