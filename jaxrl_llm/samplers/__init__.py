"""Samplers, which generate the rollouts: the embedded JAX sampler and the client of vLLM servers."""
