"""Models that hear: an audio tower whose sound becomes tokens of a text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Imported because it registers the text families that are meant below.
from deepen.checkpoint.families import decoders  # noqa: F401
from deepen.checkpoint.families.shapes import NO_MODULE, outputs, text, torch, whole
from deepen.checkpoint.family import FAMILIES, Family, Parts, Tower, register

SOUND_TOKEN = 90
FRAMES = 32
WHISPER = whole(NO_MODULE, "self_attn.out_proj", "fc2")
LLAMA = Parts(outputs=outputs("self_attn.o_proj", "mlp.fc2"))
# Names of Whisper, and the usual ones.
ENCODER = {
    "encoder_layers": 4, "d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": FRAMES // 2,
}  # fmt: skip
USUAL = {
    "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "num_mel_bins": 8,
    "max_source_positions": FRAMES // 2,
}  # fmt: skip


def sound(count: int, mask: str = "") -> Callable[[Any, int], dict[str, Any]]:
    """Inputs of 32 frames of sound a sample, standing for `count` tokens at the front of the text."""

    def inputs(config: Any, tokens: int) -> dict[str, Any]:
        words = torch.randint(4, 80, (2, tokens))
        places = torch.full((2, count), SOUND_TOKEN)
        features = torch.randn(2, config.audio_config.num_mel_bins, FRAMES)
        masked = {mask: torch.ones(2, FRAMES, dtype=torch.long)} if mask else {}
        return {"input_ids": torch.cat([places, words], 1), "input_features": features, **masked}

    return inputs


def hearing(
    model_type: str,
    words: str,
    heard: Mapping[str, Any],
    inputs: Callable[[Any, int], dict[str, Any]],
    parts: Parts = WHISPER,
    **tiny: Any,
) -> Family:
    """A family whose text tower is that of the family `words` and whose audio config is `heard`."""
    like = FAMILIES[words]
    key = "encoder_layers" if "encoder_layers" in heard else "num_hidden_layers"
    return Family(
        model_type=model_type,
        towers=(
            text(
                "language_model.layers",
                "text_config.num_hidden_layers",
                like.towers[0].parts,
                on_disk=("language_model.model.layers", "model.language_model.layers"),
            ),
            Tower(
                name="audio",
                container="audio_tower.layers",
                depth=f"audio_config.{key}",
                parts=parts,
                on_disk=("audio_tower.layers", "model.audio_tower.layers"),
            ),
        ),
        tiny={"text_config": {**like.tiny, "model_type": words}, "audio_config": heard, **tiny},
        inputs=inputs,
    )


TOKEN: dict[str, Any] = {"audio_token_id": SOUND_TOKEN}
register(
    hearing("qwen2_audio", "qwen2", ENCODER, sound(8, "feature_attention_mask"), audio_token_index=SOUND_TOKEN),
    hearing("voxtral", "llama", USUAL, sound(4), **TOKEN),
    hearing("audioflamingo3", "qwen2", USUAL, sound(8, "input_features_mask"), **TOKEN),
    hearing("glmasr", "llama", {**USUAL, "num_key_value_heads": 4}, sound(4, "input_features_mask"), LLAMA, **TOKEN),
)
