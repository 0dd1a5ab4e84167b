"""Models that see: a vision tower whose pictures become tokens of a text tower, as in LLaVA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Imported because they register the text families that are meant below.
from deepen.checkpoint.families import decoders, experts, recurrent  # noqa: F401
from deepen.checkpoint.families.multimodal import IMAGE_TOKEN, TEXT_ON_DISK, VISION
from deepen.checkpoint.families.perception import CLIP, SAM
from deepen.checkpoint.families.shapes import outputs, text, torch
from deepen.checkpoint.family import FAMILIES, Family, Parts, Tower, register

Inputs = Callable[[Any, int], dict[str, Any]]
# Where the vision towers are, and how files name them.
ENCODER = ("vision_tower.encoder.layers", "vision_tower.vision_model.encoder.layers",
           "model.vision_tower.vision_model.encoder.layers")  # fmt: skip
PIXTRAL = Parts(
    mixer=("attention",),
    feed_forward=("feed_forward",),
    outputs=outputs("attention.o_proj", "feed_forward.down_proj"),
)
AIM = Parts(mixer=("attention",), feed_forward=("ffn",), outputs=outputs("attention.out_proj", "ffn.down_proj"))
INTERN = Parts(mixer=("attention",), outputs=outputs("attention.projection_layer", "mlp.fc2"))


def shown(count: int, shape: tuple[int, ...] = (3, 16, 16), **more: Any) -> Inputs:
    """Inputs of one picture a sample of `shape`, standing for `count` tokens at the front of the text."""

    def inputs(config: Any, tokens: int) -> dict[str, Any]:
        words = torch.randint(4, 80, (2, tokens))
        places = torch.full((2, count), IMAGE_TOKEN)
        made = {name: value() if callable(value) else value for name, value in more.items()}
        return {"input_ids": torch.cat([places, words], 1), "pixel_values": torch.randn(2, *shape), **made}

    return inputs


def sizes() -> Any:
    """Two pictures of 16 x 16 pixels."""
    return torch.tensor([[16, 16]] * 2)


def cut(config: Any, tokens: int) -> dict[str, Any]:
    """One picture a sample, cut into 4 x 4 patches of 4 x 4 pixels, standing for 4 tokens."""
    return {
        **shown(4)(config, tokens),
        "pixel_values": torch.randn(2, 16, 48),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


def seeing(
    model_type: str,
    words: str,
    vision: str,
    inputs: Inputs,
    at: tuple[str, ...] = ENCODER,
    *,
    parts: Parts = CLIP,
    text_at: tuple[str, ...] = ("language_model.layers", *TEXT_ON_DISK),
    vision_tiny: Mapping[str, Any] = VISION,
    feature: str = "",
    **tiny: Any,
) -> Family:
    """A family whose text tower is that of the family `words`.

    Args:
        model_type: as in config.json.
        words: the model type of the text config, a family of the table.
        vision: the model type of the vision config.
        inputs: makes inputs of the tiny model.
        at: the container of the vision tower, then its prefixes on disk.
        parts: how a vision layer divides.
        text_at: the container of the text tower, then its prefixes on disk.
        vision_tiny: values of the tiny vision config.
        feature: the field that says after which vision layer the picture is taken.
        tiny: further values of the tiny config.
    """
    like = FAMILIES[words]
    return Family(
        model_type=model_type,
        towers=(
            text(text_at[0], "text_config.num_hidden_layers", like.towers[0].parts, on_disk=text_at[1:]),
            Tower(name="vision", container=at[0], depth="vision_config.num_hidden_layers", parts=parts, on_disk=at[1:]),
        ),
        tiny={
            "text_config": {**like.tiny, "model_type": words},
            "vision_config": {**vision_tiny, "model_type": vision},
            **tiny,
        },
        features={feature: "vision"} if feature else {},
        inputs=inputs,
    )


INDEX: dict[str, Any] = {"image_token_index": IMAGE_TOKEN}
IDENTITY: dict[str, Any] = {"image_token_id": IMAGE_TOKEN}
VIDEO: dict[str, Any] = {"video_token_index": 93}
GRID: dict[str, Any] = {"image_grid_pinpoints": [[16, 16]]}
LAYER = "vision_feature_layer"
ONE = shown(4, (1, 3, 16, 16))
TEXT_MODEL = ("text_model.layers", "model.text_model.layers")
VISION_MODEL = ("vision_model.encoder.layers", "model.vision_model.encoder.layers")

register(
    seeing("vipllava", "llama", "clip_vision_model", shown(16), feature=LAYER, vision_feature_layer=[-2, 4, -1],
           **INDEX),
    seeing("llava_next", "llama", "clip_vision_model", shown(36, (2, 3, 16, 16), image_sizes=sizes), feature=LAYER,
           vision_feature_layer=-2, **INDEX, **GRID),
    seeing("llava_next_video", "llama", "clip_vision_model", shown(36, (2, 3, 16, 16), image_sizes=sizes),
           feature=LAYER, vision_feature_layer=-2, **INDEX, **GRID, **VIDEO),
    seeing("llava_onevision", "qwen2", "siglip_vision_model", shown(36, (2, 3, 16, 16), image_sizes=sizes),
           feature=LAYER, vision_feature_layer=-2, **INDEX, **GRID, **VIDEO),
    seeing("mistral3", "mistral", "pixtral", shown(4, image_sizes=sizes), feature=LAYER, vision_feature_layer=-1,
           at=("vision_tower.transformer.layers", "model.vision_tower.transformer.layers"), parts=PIXTRAL, **INDEX),
    seeing("internvl", "qwen2", "internvl_vision", shown(4), feature=LAYER, vision_feature_layer=-2,
           at=("vision_tower.encoder.layer", "model.vision_tower.encoder.layer"), parts=INTERN,
           vision_tiny={**VISION, "image_size": [16, 16], "patch_size": [4, 4]}, **IDENTITY),
    seeing("idefics2", "mistral", "idefics2_vision", ONE, at=VISION_MODEL, text_at=TEXT_MODEL,
           perceiver_config={"resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4,
                             "resampler_head_dim": 8, "num_key_value_heads": 2}, **IDENTITY),
    seeing("idefics3", "llama", "idefics3_vision", ONE, at=VISION_MODEL, text_at=TEXT_MODEL, scale_factor=2,
           **IDENTITY),
    seeing("smolvlm", "llama", "smolvlm_vision", ONE, at=VISION_MODEL, text_at=TEXT_MODEL, scale_factor=2,
           **IDENTITY),
    seeing("cohere2_vision", "cohere2", "siglip_vision_model", shown(4), downsample_factor=2,
           alignment_intermediate_size=64, **IDENTITY),
    seeing("deepseek_vl", "llama", "siglip_vision_model", shown(16), at=VISION_MODEL, **IDENTITY),
    seeing("janus", "llama", "janus_vision_model", shown(16), at=VISION_MODEL,
           parts=Parts(outputs=outputs("self_attn.projection_layer", "mlp.fc2")),
           vision_tiny={**VISION, "mlp_ratio": 2, "projection_dim": 32, "num_image_tokens": 16},
           vq_config={"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
                      "latent_channels": 8, "projection_dim": 8, "image_token_embed_dim": 8, "num_patches": 4},
           **IDENTITY),
    seeing("got_ocr2", "qwen2", "got_ocr2_vision", shown(4, (3, 32, 32)),
           ("vision_tower.layers", "model.vision_tower.layers"),
           parts=Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.lin2")),
           vision_tiny={**SAM, "num_hidden_layers": 4, "global_attn_indexes": [1, 3]}, image_seq_length=4, **INDEX),
    seeing("lfm2_vl", "lfm2", "siglip2_vision_model", cut, vision_tiny={**VISION, "num_patches": 16},
           downsample_factor=2, **IDENTITY),
    seeing("ovis2", "qwen2", "ovis2_vision", shown(4),
           at=("vision_tower.transformer.encoder.layers", "model.vision_tower.transformer.encoder.layers"), parts=AIM,
           vision_tiny={**VISION, "hidden_stride": 2, "num_visual_indicator_tokens": 5, "vocab_size": 64,
                        "tokenize_function": "softmax"}, visual_indicator_token_ids=[81, 82, 83, 84, 85],
           vocab_size=96, hidden_size=32, **IDENTITY),
    seeing("lighton_ocr", "qwen3", "pixtral", shown(4, image_sizes=sizes), parts=PIXTRAL, spatial_merge_size=2,
           at=("vision_encoder.transformer.layers", "model.vision_encoder.transformer.layers",
               "model.vision_encoder.layers"), **IDENTITY),
    seeing("aria", "aria_text", "idefics3_vision", shown(4), at=ENCODER,
           projector_patch_to_query_dict={16: 4}, **INDEX),
)  # fmt: skip
