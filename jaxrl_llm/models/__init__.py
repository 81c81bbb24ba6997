"""Transformer policies, value models and reward models, and Hugging Face folders in and out."""
