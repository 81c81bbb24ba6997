"""Published weights: their format, and the code with which a vLLM server loads them; this package imports nothing of the other rooms."""
