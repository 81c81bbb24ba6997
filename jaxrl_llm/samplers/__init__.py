"""Who generates: the embedded JAX sampler and the client of vLLM servers."""
