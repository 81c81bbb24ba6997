"""Rollouts from vLLM servers: what is asked of one and by which routes, its command line, adapters alone."""

from jaxrl_llm.samplers.servers.autoscale import Autoscale
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

__all__ = ["Autoscale", "Discovery", "LocalServers", "VllmSampler"]
