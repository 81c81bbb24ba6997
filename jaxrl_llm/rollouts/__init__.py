"""From prompts to scored groups: generation with an environment's turns, rewards, filters, buffers."""
