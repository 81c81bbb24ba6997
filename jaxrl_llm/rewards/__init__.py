"""What a rollout is worth: verifiers, services and their weighted sum."""
