"""The command line and environment of local SGLang servers."""

import os
from dataclasses import dataclass
from typing import ClassVar

from jaxrl_llm.samplers.servers import local_server
from jaxrl_llm.samplers.servers.local_server import HOST, LocalServer


@dataclass(frozen=True, kw_only=True)
class LocalServers(local_server.LocalServers):
    """SGLang servers that this process starts and stops."""

    kind: ClassVar[str] = "SGLang"
    name: ClassVar[str] = "sglang.LocalServers"
    packages: ClassVar[tuple[str, ...]] = ("sglang",)
    macro: ClassVar[str] = "SGLANG"
    chosen: ClassVar[frozenset[str]] = frozenset(("--host", "--port", "--config", "--api-key"))
    probes: ClassVar[tuple[str, ...]] = (
        "/model_info",
        "/health",
    )  # the second, which asks for no key, once it has warmed up

    def command(self, server: LocalServer) -> list[str]:
        """Returns the command line of a server, and writes its key to a file beside its log that its user alone can read."""
        share, settings = self.memory_share, server.log.with_suffix(".yaml")
        settings.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"api-key: '{server.key}'\n")
        return [
            self.executable, "-m", "sglang.launch_server", "--config", str(settings), "--model-path", str(server.model),
            "--host", HOST, "--port", str(server.port), "--load-format", "dummy", "--log-level", "warning", "--enable-metrics",
            "--random-seed", str(server.number), "--tp-size", str(self.tensor_parallel),
            *(() if share is None else ("--mem-fraction-static", str(share))),
            *server.arguments, *map(str, self.arguments),
        ]  # fmt: skip

    def own_environment(self, key: str) -> dict[str, str]:
        # A server's context is a few tokens longer than the run's texts, which may have all positions of the model.
        return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
