"""A local page that shows runs and results: curves, rollouts token by token, and two of them on the same prompts."""
