"""Per-token log-prob and entropy of given logits."""
