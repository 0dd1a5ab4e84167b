"""Transforms of checkpoints that need no training: each gives a new checkpoint and a report, and touches no file."""
