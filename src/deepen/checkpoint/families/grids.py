"""Models whose pictures are a grid of patches of any size, as in Qwen3-VL."""

from __future__ import annotations

from typing import Any

# Imported because they register the text families that are meant below.
from deepen.checkpoint.families import decoders, experts  # noqa: F401
from deepen.checkpoint.families.multimodal import QWEN, QWEN_TEXT, patches
from deepen.checkpoint.families.shapes import EXPERTS, outputs, text
from deepen.checkpoint.family import FAMILIES, Family, Parts, Tower, register

BLOCK = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
LINEAR = Parts(mixer=("attn",), outputs=outputs("attn.proj", "mlp.linear_fc2"))
DEEPSTACK = "vision_config.deepstack_visual_indexes"


def gridded(
    model_type: str,
    like: str,
    parts: Parts,
    words: dict[str, Any],
    picture: dict[str, Any],
    *,
    stacked: bool = False,
    **tiny: Any,
) -> Family:
    """A family with blocks over patches, whose text layers divide as those of the family `like`.

    Where it is `stacked`, streams of the vision tower join the text tower.
    """
    return Family(
        model_type=model_type,
        towers=(
            text(
                "language_model.layers",
                "text_config.num_hidden_layers",
                FAMILIES[like].towers[0].parts,
                on_disk=("model.language_model.layers", "language_model.layers", "model.layers"),
                joins=DEEPSTACK if stacked else "",
            ),
            Tower(
                name="vision",
                container="visual.blocks",
                depth="vision_config.depth",
                parts=parts,
                on_disk=("model.visual.blocks", "visual.blocks"),
            ),
        ),
        tiny={"text_config": words, "vision_config": picture, **tiny},
        taps={DEEPSTACK: "vision"} if stacked else {},
        inputs=patches,
    )


STACK = {**BLOCK, "num_position_embeddings": 16, "deepstack_visual_indexes": [2]}
register(
    gridded("qwen3_vl", "qwen3", LINEAR, QWEN_TEXT, STACK, stacked=True, **QWEN),
    gridded(
        "qwen3_vl_moe",
        "qwen3_moe",
        LINEAR,
        {**EXPERTS, **QWEN_TEXT, "decoder_sparse_step": 2},
        STACK,
        stacked=True,
        **QWEN,
    ),
)
