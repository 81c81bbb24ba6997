"""RL, supervised and preference objectives: one file each, pure functions of a view and a batch."""
