"""The table of families, one file a kind of model; importing this package registers them all."""

from deepen.checkpoint.families import decoders, encoders, experts, perception, recurrent, seq2seq

__all__ = ["decoders", "encoders", "experts", "perception", "recurrent", "seq2seq"]
