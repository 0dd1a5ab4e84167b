"""Mixers: sublayers that mix tokens, one file a method."""
