"""Processes behind rewards: the sandbox, a classifier server, workers of verifiers."""
