"""The divergence of a teacher's next-token distribution from the policy's, without the logits of a batch."""
