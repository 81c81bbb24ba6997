"""Per-token log-prob and entropy from hidden states and head, without logits in memory."""
