"""Hugging Face checkpoints in and out; the only package that imports transformers."""
