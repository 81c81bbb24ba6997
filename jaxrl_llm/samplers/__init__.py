"""Samplers, which generate the rollouts: the embedded JAX sampler and the clients of vLLM and SGLang servers."""
