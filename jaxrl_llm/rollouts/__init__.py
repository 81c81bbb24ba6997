"""From prompts to scored groups: generation, environments and agents that play, rewards, filters, buffers."""
