"""The table of families, one file a kind of model; importing this package registers them all."""

from deepen.checkpoint.families import (
    crossing,
    decoders,
    encoders,
    experts,
    grids,
    hearing,
    multimodal,
    pairs,
    per_layer,
    perception,
    recurrent,
    refused,
    seeing,
    seq2seq,
    sound,
)

__all__ = [
    "crossing",
    "decoders",
    "encoders",
    "experts",
    "grids",
    "hearing",
    "multimodal",
    "pairs",
    "per_layer",
    "perception",
    "recurrent",
    "refused",
    "seeing",
    "seq2seq",
    "sound",
]
