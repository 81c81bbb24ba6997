"""Per-token log-prob and entropy of logits that exist already."""
