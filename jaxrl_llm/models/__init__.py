"""Transformer policies in Flax NNX and their Hugging Face name maps."""
