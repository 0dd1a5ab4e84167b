"""Models whose text layers attend to pictures: Llama 3.2 Vision."""

from __future__ import annotations

from typing import Any

from deepen.checkpoint.families.shapes import TINY, outputs, text, torch
from deepen.checkpoint.family import Family, Parts, Tower, register

SELF_OR_CROSS = Parts(
    mixer=("self_attn", "cross_attn"), outputs=outputs(("self_attn.o_proj", "cross_attn.o_proj"), "mlp.down_proj")
)
TILED = Parts(outputs=outputs("self_attn.o_proj", "mlp.fc2"))


def tiles(config: Any, tokens: int) -> dict[str, Any]:
    """One picture of one tile beside one of two, and a text."""
    size = config.vision_config.image_size
    return {
        "input_ids": torch.randint(4, 80, (2, tokens)),
        "pixel_values": torch.randn(2, 1, 2, 3, size, size),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        # Without a mask the class would hide the end of the picture from the first words.
        "cross_attention_mask": torch.ones(2, tokens, 1, 2, dtype=torch.long),
    }


register(
    Family(
        model_type="mllama",
        towers=(
            text(
                "language_model.layers",
                "text_config.num_hidden_layers",
                SELF_OR_CROSS,
                on_disk=("language_model.model.layers", "model.language_model.layers"),
                crosses="text_config.cross_attention_layers",
            ),
            Tower(
                name="vision",
                container="vision_model.transformer.layers",
                depth="vision_config.num_hidden_layers",
                parts=TILED,
                on_disk=("vision_model.transformer.layers", "model.vision_model.transformer.layers"),
            ),
            Tower(
                name="global",
                container="vision_model.global_transformer.layers",
                depth="vision_config.num_global_layers",
                parts=TILED,
                on_disk=("vision_model.global_transformer.layers", "model.vision_model.global_transformer.layers"),
            ),
        ),
        tiny={
            "text_config": {
                **TINY,
                "cross_attention_layers": [3],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_global_layers": 4,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [2, 3],
                "vision_output_dim": 96,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            "image_token_index": 90,
        },
        taps={"vision_config.intermediate_layers_indices": "vision"},
        inputs=tiles,
    )
)
