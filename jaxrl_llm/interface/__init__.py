"""The interface for users: runs from Python (`rl.grpo(...)`), and the command `jaxrl`."""
