"""Who generates: the embedded JAX engine and clients of servers."""
