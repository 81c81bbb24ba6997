"""Published weights: their format, and what a vLLM server runs to take them; it imports nothing of the other rooms."""
