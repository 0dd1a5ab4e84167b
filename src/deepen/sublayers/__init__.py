"""Sublayers: what a part of a layer computes. They never normalise, add no residual and know no depth."""
