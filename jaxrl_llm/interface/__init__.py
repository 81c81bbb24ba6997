"""What a user calls: runs from Python (`rl.grpo(...)`), and the command `jaxrl`."""
