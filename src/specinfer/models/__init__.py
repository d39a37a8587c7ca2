"""Checkpoints, tokenizers and model families."""
