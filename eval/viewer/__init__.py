"""Viewer: a local web page of runs and results, with curves, rollouts token by token, and comparisons on the same prompts."""
