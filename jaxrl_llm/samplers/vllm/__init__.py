"""Rollouts from vLLM servers: the fleet, its client and its updates, local servers, a proxy.

What gin files name is imported when it is asked for: the proxy runs on samplers' hosts, which have no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.samplers.vllm.autoscale import Autoscale
    from jaxrl_llm.samplers.vllm.discovery import Discovery
    from jaxrl_llm.samplers.vllm.local_server import LocalServers
    from jaxrl_llm.samplers.vllm.sampler import VllmSampler

__all__ = ["Autoscale", "Discovery", "LocalServers", "VllmSampler"]
_PLACES = {"Autoscale": "autoscale", "Discovery": "discovery", "LocalServers": "local_server", "VllmSampler": "sampler"}


def __getattr__(name: str) -> Any:
    """A component by its name."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
