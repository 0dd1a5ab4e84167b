"""Models of a text encoder beside a vision or audio encoder, each with its own depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deepen.checkpoint.families.encoders import BERT
from deepen.checkpoint.families.perception import CLIP, IMAGE
from deepen.checkpoint.families.shapes import TINY, outputs, torch
from deepen.checkpoint.family import Family, Parts, Tower, register

WORDS = {**TINY, "num_hidden_layers": 4, "projection_dim": 16, "projection_size": 32, "project_dim": 16}
PICTURE = {**IMAGE, "num_hidden_layers": 5, "projection_dim": 16}
AIM = Parts(mixer=("attention",), feed_forward=("ffn",), outputs=outputs("attention.out_proj", "ffn.down_proj"))
BLIP = Parts(outputs=outputs("self_attn.projection", "mlp.fc2"))


def both(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Two texts and two pictures."""
    size = config.vision_config.image_size
    return {
        "input_ids": torch.randint(4, config.text_config.vocab_size, (2, tokens)),
        "pixel_values": torch.randn(2, 3, size, size),
    }


def cut(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Two texts and two pictures cut into patches."""
    return {
        "input_ids": both(config, tokens)["input_ids"],
        "pixel_values": torch.randn(2, 16, 3 * config.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    }


def pair(
    model_type: str,
    text: tuple[str, Parts] = ("text_model.encoder.layers", CLIP),
    vision: tuple[str, Parts] = ("vision_model.encoder.layers", CLIP),
    inputs: Callable[[Any, int], dict[str, torch.Tensor]] = both,
    words: Mapping[str, Any] | None = None,
    picture: Mapping[str, Any] | None = None,
    text_on_disk: tuple[str, ...] = (),
    vision_on_disk: tuple[str, ...] = (),
    **tiny: Any,
) -> Family:
    """A family in the shape of CLIP."""
    return Family(
        model_type=model_type,
        towers=(
            Tower(
                name="text",
                container=text[0],
                depth="text_config.num_hidden_layers",
                parts=text[1],
                on_disk=text_on_disk,
            ),
            Tower(
                name="vision",
                container=vision[0],
                depth="vision_config.num_hidden_layers",
                parts=vision[1],
                on_disk=vision_on_disk,
            ),
        ),
        tiny={
            "text_config": {**WORDS, **(words or {})},
            "vision_config": {**PICTURE, **(picture or {})},
            "projection_dim": 16,
            **tiny,
        },
        inputs=inputs,
    )


for name in "clip siglip metaclip_2 owlvit owlv2".split():
    register(pair(name))
register(
    pair("siglip2", inputs=cut, picture={"num_patches": 16}),
    pair("chinese_clip", text=("text_model.encoder.layer", BERT)),
    pair(
        "altclip",
        text=("text_model.roberta.encoder.layers", BERT),
        text_on_disk=("text_model.roberta.encoder.layer",),
        vision_on_disk=("vision_model.encoder.layers", "vision_model.encoder.layer"),
    ),
    pair("aimv2", text=("text_model.encoder.layers", AIM), vision=("vision_model.encoder.layers", AIM)),
    pair(
        "blip",
        text=("text_model.encoder.layer", BERT),
        vision=("vision_model.encoder.layers", BLIP),
        words={"encoder_hidden_size": 32},
        # Its generating class has another text model.
        architectures=["BlipModel"],
    ),
)

# One half of a pair, saved alone; no automatic class of transformers lists them.
for name, parts in {
    **dict.fromkeys("siglip_text_model siglip2_text_model metaclip_2_text_model".split(), CLIP),
    "aimv2_text_model": AIM,
}.items():
    register(
        Family(model_type=name, towers=(Tower(name="encoder", container="encoder.layers", parts=parts),), tiny={**TINY})
    )
register(
    Family(
        model_type="metaclip_2_vision_model",
        towers=(Tower(name="vision", container="encoder.layers", parts=CLIP),),
        tiny=IMAGE,
    ),
    Family(
        model_type="blip_vision_model",
        towers=(Tower(name="vision", container="encoder.layers", parts=BLIP),),
        tiny=IMAGE,
    ),
)
# Its decoder of masks reads the streams after the listed vision layers.
register(
    replace(
        pair(
            "clipseg",
            architectures=["CLIPSegForImageSegmentation"],
            extract_layers=[2, 3],
            reduce_dim=16,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=24,
        ),
        taps={"extract_layers": "vision"},
    )
)
