"""The sampler in the learner's own process and mesh: prefill, decode in slots, the choice of tokens."""

from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

__all__ = ["EmbeddedSampler"]
