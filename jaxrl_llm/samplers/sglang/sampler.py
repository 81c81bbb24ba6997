"""Rollouts from unmodified SGLang servers: local ones that are started here, a list of addresses, or servers that are looked up.

The learner is one process, and writes each version as a folder of safetensors that the servers see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax

from jaxrl_llm import components
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.publication.object_store import is_stored
from jaxrl_llm.samplers.servers.assembly import Assembly
from jaxrl_llm.samplers.servers.autoscale import Autoscale
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.servers.local_server import LocalServer
from jaxrl_llm.samplers.servers.publisher import CANARY, canary_tokens, check_published, default_folder
from jaxrl_llm.samplers.servers.served import ServedSampler
from jaxrl_llm.samplers.sglang.local_server import LocalServers
from jaxrl_llm.samplers.sglang.publisher import FolderPublisher
from jaxrl_llm.samplers.sglang.server_api import MARGIN, SglangHttp


@dataclass(frozen=True, kw_only=True)
class SglangSampler(ServedSampler):
    """Samples from SGLang servers, which read the learner's weights from published folders.

    Attributes:
      spawn: start local servers as `local` says; False uses those of `urls` and `discovery`.
      local: settings of local servers.
      urls: addresses of running servers, started with --enable-metrics.
      discovery: where further servers are looked up, which come and go during the run.
      autoscale: rule of the number of those servers, by how long the learner waits, and the command that starts and stops them.
      api_key_variable: environment variable that holds the servers' key; empty for none.
      dtype: element type that is served, "bfloat16", "float32" or "float16".
      publication: folder for published weights that learner and servers see; None is a folder of the run.
      keep: number of newest published versions that are kept.
      inflight: treatment of requests in flight while weights change: "abort_resume" (cut, asked again) or "wait" (finished first).
      request_s: most seconds of one request.
      control_s: most seconds of one step of an update.
      canary: text on which servers and learner are compared after each update (publication/canary.py); empty for none.
    """

    macro: ClassVar[str] = "SGLANG"

    spawn: bool = True
    local: LocalServers = field(default_factory=LocalServers)
    urls: Sequence[str] = ()
    discovery: Discovery = field(default_factory=Discovery)
    autoscale: Autoscale = field(default_factory=Autoscale)
    api_key_variable: str = ""
    dtype: str = "bfloat16"
    publication: str | None = None
    keep: int = 2
    inflight: Literal["abort_resume", "wait"] = "abort_resume"
    request_s: float = 600.0
    control_s: float = 60.0
    canary: str = CANARY

    def __post_init__(self) -> None:
        self.check_servers("('http://127.0.0.1:30000',)")
        if is_stored(self.publication or ""):
            components.refuse(self, "publication", "a folder that servers see, since SGLang reads no object storage")

    def start(self, policy: Policy, tokenizer: Any, *, max_length: int, run_dir: Path) -> FleetClient:
        """Returns the running sampler; local servers are started now, and the first request waits for them.

        Raises:
          FileNotFoundError: local servers are to be started by a Python without SGLang.
          ValueError: the model is not published to SGLang, a length is beyond the model's, the policy is in the bitwise mode, the learner
            has several processes, or an API key's variable is not set.
        """
        check_published(policy, max_length, "SGLang")
        if policy.architecture.experts is not None:
            raise ValueError(
                "a policy with experts is not published to SGLang servers: sample it with vllm.VllmSampler or embedded.EmbeddedSampler"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"SGLang servers get their weights from a learner of one process (got {jax.process_count()}): include gin/samplers/vllm.gin"
            )
        assembly = Assembly(
            children=self._children(policy, tokenizer, max_length, run_dir) if self.spawn else [], key=self.key(), urls=self.urls,
            discovery=self.discovery, api=lambda url, key: self._http(url, key, policy, max_length), limits=self, inflight=self.inflight,
        )  # fmt: skip
        tokens = canary_tokens(self.canary, tokenizer, policy.architecture.vocabulary_size)[: max_length - 1]
        publisher = FolderPublisher(
            policy=policy.plain,
            folder=default_folder(self.publication, run_dir),
            dtype=self.dtype,
            keep=self.keep,
            canary=tokens,
        )
        # JAX reserves its share of a GPU now, and not while a server measures what is free.
        jax.block_until_ready(jax.numpy.zeros(1))
        assembly.start()
        return FleetClient(
            publisher=publisher, connect=assembly.connect, disconnect=assembly.disconnect, tokenizer=tokenizer, max_length=max_length,
            seeded=False, remove=self.spawn, autoscale=self.autoscale,
        )  # fmt: skip

    def _http(self, url: str, key: str, policy: Policy, max_length: int) -> SglangHttp:
        return SglangHttp(
            url=url, api_key=key, vocabulary=policy.architecture.vocabulary_size, length=max_length, request_s=self.request_s,
            control_s=self.control_s, update_s=self.update_s,
        )  # fmt: skip

    def _children(self, policy: Policy, tokenizer: Any, max_length: int, run_dir: Path) -> list[LocalServer]:
        """Returns the local servers, not started yet; writes the folder of their model."""
        self.local.release()
        model = (run_dir / "sglang" / "model").absolute()
        model.mkdir(parents=True, exist_ok=True)
        hf_weights.describe(policy.plain, model, tokenizer, dtype=self.dtype)
        # Logits are float32, as the learner's are: in 16 bits those near 16 are 1/16 or 1/8 apart.
        head = () if self.dtype == "float32" else ("--enable-fp32-lm-head",)
        arguments = (
            "--dtype", self.dtype, *head, "--context-length", str(max_length + MARGIN), "--max-running-requests", str(self.sequences),
        )  # fmt: skip
        return [
            LocalServer(
                config=self.local, number=i, model=model, log=model.parent / f"server{i}.log", arguments=arguments
            )
            for i in range(self.local.count)
        ]
