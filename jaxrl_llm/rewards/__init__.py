"""What a rollout is worth: verifiers, judges, clients of services, and their weighted sum."""
