"""Rollouts from SGLang servers: what is asked of one and by which routes, its command line, published folders."""

from jaxrl_llm.samplers.servers.autoscale import Autoscale
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.sglang.local_server import LocalServers
from jaxrl_llm.samplers.sglang.sampler import SglangSampler

__all__ = ["Autoscale", "Discovery", "LocalServers", "SglangSampler"]
