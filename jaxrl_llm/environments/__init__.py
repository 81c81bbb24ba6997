"""Environments in which the policy acts: the project's own, and adapters of others', one file each."""
