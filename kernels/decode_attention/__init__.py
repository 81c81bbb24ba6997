"""Attention of one new token a slot over a stacked key/value cache."""
