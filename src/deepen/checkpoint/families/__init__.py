"""The table of families, one file a kind of model; importing this package registers them all."""

from deepen.checkpoint.families import (
    decoders,
    encoders,
    experts,
    multimodal,
    pairs,
    perception,
    recurrent,
    seq2seq,
    sound,
)

__all__ = ["decoders", "encoders", "experts", "multimodal", "pairs", "perception", "recurrent", "seq2seq", "sound"]
