"""Selective fine-tuning: which layers, blocks of matrices or single entries a run of the training loop moves."""
