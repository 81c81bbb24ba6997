"""Rewards of rollouts: verifiers, judges, clients of services, and their weighted sum."""
