"""Attention of one new token per slot over a stacked key/value cache."""
