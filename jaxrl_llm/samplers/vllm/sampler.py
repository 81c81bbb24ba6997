"""Rollouts from unmodified vLLM servers: local ones that are started here, a list of addresses, or servers that are looked up.

On several hosts process 0 alone sends requests; every process writes its own shards of the published weights.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import jax
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Params
from jaxrl_llm.publication.cuda_ipc import Cuda
from jaxrl_llm.publication.object_store import is_stored
from jaxrl_llm.publication.relays.client import Relays
from jaxrl_llm.samplers.routes import FLAG, Recording
from jaxrl_llm.samplers.servers.assembly import Assembly
from jaxrl_llm.samplers.servers.autoscale import Autoscale
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.servers.local_server import LocalServer
from jaxrl_llm.samplers.servers.publisher import (
    CANARY,
    Publisher,
    canary_tokens,
    check_published,
    default_address,
    default_folder,
)
from jaxrl_llm.samplers.servers.served import ServedSampler
from jaxrl_llm.samplers.servers.server_update import Inflight
from jaxrl_llm.samplers.servers.store_publisher import StorePublisher
from jaxrl_llm.samplers.vllm import adapters
from jaxrl_llm.samplers.vllm.adapters import AdapterPublisher
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.server_api import VllmHttp
from jaxrl_llm.serving import TOKEN_VARIABLE, check_token


@dataclass(eq=False, kw_only=True)
class FollowingSampler:
    """The sampler of processes other than 0, which publishes its shards together with process 0.

    Attributes:
      publisher: writes versions of the weights; all processes have one.
      adapted: whether it gets adapters beside their base instead of their sum.
      version: the policy version that was published last; -1 before the first.
    """

    publisher: Publisher
    adapted: bool = False
    version: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._written: asyncio.Task[None] | None = None

    overlaps = True

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        """Raises RuntimeError, since process 0 samples."""
        raise RuntimeError("process 0 alone asks the servers")

    async def publish(self, params: Params, version: int) -> None:
        """Writes this process's shards; returns when the learner may change them, and raises as the publisher does."""
        if self._written is not None:
            await self._written
        self.publisher.start(params, version)
        self.version = version
        self._written = asyncio.create_task(self.publisher.finish(version))

    async def close(self) -> None:
        """Waits for what is being written, and closes the publisher."""
        if self._written is not None:
            await asyncio.gather(self._written, return_exceptions=True)
        self.publisher.close(remove=False)

    def metrics(self) -> Mapping[str, float]:
        return {}


MODEL = "policy"  # the policy's name at servers


@dataclass(frozen=True, kw_only=True)
class VllmSampler(ServedSampler):
    """Samples from vLLM servers, which get the learner's weights through published checkpoints.

    Attributes:
      spawn: start local servers as `local` says; False uses those of `urls` and `discovery`.
      local: settings of local servers.
      urls: addresses of running servers, or of proxies before them.
      discovery: where further servers are looked up, which come and go during the run.
      autoscale: rule of the number of those servers, by how long the learner waits, and the command that starts and stops them.
      proxied: whether `urls` are proxies of this package.
      api_key_variable: environment variable that holds the servers' key or the proxies' token; empty for none.
      model: the name under which the servers of `urls` serve the policy.
      dtype: element type that is served, "bfloat16", "float32" or "float16".
      quantization: how servers quantize the layers' matrices while they load them: "" (not at all), "fp8_per_channel",
        "fp8_per_tensor" or "fp8_per_block", as vLLM's --quantization names it; local servers are started so. The sampling policy then
        differs from the learner's by more than rounding to 16 bits: `gap/...` measures it, and importance weights correct it.
      transfer: "orbax" (published checkpoints) or "cuda_ipc" (straight from the learner's GPU memory, on its host alone).
      publication: folder for published weights that learner and servers see, or an address of object storage ("gs://BUCKET/PATH",
        "s3://BUCKET/PATH"); None is a folder of the run.
      relay_port: port of the relay on each sampler host; each relay fetches a version once and passes it on to others, and the variable
        JAXRL_LLM_TOKEN holds their token. 0 has every server read the learner's publication.
      relay_first: address of a relay on the learner's host, where the samplers' hosts do not see the folder of `publication`; empty for none.
      keep: number of newest published versions that are kept.
      inflight: treatment of requests in flight while weights change: "recompute" (frozen, then continued exactly),
        "stale_kv" (frozen, continued on old keys and values), "wait" (finished first), "abort_resume" (cut, asked again).
      seeded: whether requests carry seeds; False where a server's sampler does not support them (vLLM 0.32 on a CPU fails now and then).
      request_s: most seconds of one request.
      control_s: most seconds of one step of an update.
      adapters: True publishes LoRA adapters alone, which servers load beside the base that they hold from their start: there is no
        pause, and a request keeps its adapters to its end, whatever `inflight` says. Local servers get the base from the learner once;
        those of `urls` already serve it, with --enable-lora, --max-lora-rank of the rank or more, --max-loras of the staleness + 2, and
        VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and read the folder of `publication`. False publishes the sum of base and adapters.
      tenant: with `adapters`, name of this learner among those that share servers, the first part of its adapters' names, of letters,
        digits, "_" and "."; a restarted run unloads what the former one left. One run at a time has a name; empty for none.
      record_routes: record the experts that each token goes to, for train.Router.replay = "R3" and for `router/differs`: servers of
        `urls` need --enable-return-routed-experts.
      canary: text on which servers and learner are compared after each update (publication/canary.py); empty for none.
    """

    macro: ClassVar[str] = "VLLM"

    spawn: bool = True
    local: LocalServers = field(default_factory=LocalServers)
    urls: Sequence[str] = ()
    discovery: Discovery = field(default_factory=Discovery)
    autoscale: Autoscale = field(default_factory=Autoscale)
    proxied: bool = False
    api_key_variable: str = ""
    model: str = MODEL
    dtype: str = "bfloat16"
    quantization: Literal["", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block"] = ""
    transfer: Literal["orbax", "cuda_ipc"] = "orbax"
    publication: str | None = None
    relay_port: int = 0
    relay_first: str = ""
    keep: int = 2
    inflight: Inflight = "recompute"
    seeded: bool = True
    request_s: float = 600.0
    control_s: float = 60.0
    adapters: bool = False
    tenant: str = ""
    record_routes: bool = False
    canary: str = CANARY

    def __post_init__(self) -> None:
        self.check_servers("('http://127.0.0.1:8000',)")
        if is_stored(self.publication or "") and not (self.publication or "").partition("://")[2].strip("/"):
            components.refuse(self, "publication", "a folder, or gs://BUCKET/PATH or s3://BUCKET/PATH")
        if self.adapters and (self.transfer != "orbax" or self.proxied or is_stored(self.publication or "")):
            raise ValueError(
                "VllmSampler.adapters needs transfer 'orbax', servers without a proxy of ours, and a folder for publication, from which vLLM "
                f"reads adapters (got {self.transfer!r}, proxied={self.proxied} and {self.publication!r})"
            )
        adapters.check_tenant(self.tenant, self.adapters)
        if self.quantization and (self.dtype == "float32" or self.adapters):
            raise ValueError(
                "VllmSampler.quantization needs dtype 'bfloat16' or 'float16', and adapters = False "
                f"(got {self.quantization!r} with {self.dtype!r} and adapters={self.adapters})"
            )
        if self.transfer == "cuda_ipc" and self.proxied:
            raise ValueError(
                f"VllmSampler.transfer must be 'orbax', or 'cuda_ipc' for servers of this host without a proxy (got {self.transfer!r} "
                f"with proxied={self.proxied})"
            )
        if not 0 <= self.relay_port < 1 << 16 or (self.relay_first and not self.relay_first.startswith("http")):
            raise ValueError(
                "VllmSampler.relay_port must be 0..65535 and relay_first an address like http://HOST:PORT "
                f"(got {self.relay_port} and {self.relay_first!r})"
            )
        if (self.relay_port and (self.adapters or self.transfer != "orbax")) or (
            self.relay_first and not self.relay_port
        ):
            raise ValueError(
                "VllmSampler.relay_port needs transfer 'orbax' and all weights, and relay_first needs a relay_port "
                f"(got {self.relay_port}, {self.relay_first!r}, {self.transfer!r} and adapters={self.adapters})"
            )
        if self.record_routes and self.proxied:
            raise ValueError(
                "VllmSampler.record_routes must be False for servers behind a proxy of ours, which hands on no records of experts "
                f"(got {self.record_routes} with proxied={self.proxied})"
            )

    def start(
        self, policy: Policy, tokenizer: Any, *, max_length: int, run_dir: Path
    ) -> FleetClient | FollowingSampler:
        """Returns the running sampler; local servers are started now, and the first request waits for them. Process 0 sends the requests.

        Raises:
          FileNotFoundError: local servers are to be started by a Python without vLLM.
          ValueError: the model is not published to vLLM, a length is beyond the model's, the policy is in the bitwise mode, vLLM would
            choose other experts, or an API key's variable is not set.
        """
        check_published(policy, max_length, "vLLM")
        if policy.architecture.experts is not None and policy.architecture.experts.choice_bias:
            raise ValueError(
                "a policy whose experts are chosen with a bias (choice_bias) is not published to vLLM servers, which have no place for "
                "it and would send tokens to other experts: sample it with embedded.EmbeddedSampler, or set "
                "sources.PolicySource.choice_bias = False"
            )
        if self.quantization and policy.architecture.experts is not None:
            raise ValueError(
                "a policy with experts is published to vLLM servers that do not quantize it: set VLLM_QUANTIZATION = '' "
                f"(got {self.quantization!r})"
            )
        alone = self._alone(policy) is not None
        if jax.process_index() > 0:
            return FollowingSampler(publisher=self._publisher(policy, tokenizer, max_length, run_dir), adapted=alone)
        assembly = Assembly(
            children=self._children(policy, tokenizer, max_length, run_dir) if self.spawn else [],
            key=self.key(), urls=self.urls, discovery=self.discovery, api=lambda url, key: self._http(url, key, policy),
            limits=self, inflight=self.inflight, relays=self._relays(), late=alone,
        )  # fmt: skip
        publisher = self._publisher(policy, tokenizer, max_length, run_dir)
        # JAX reserves its share of a GPU now, and not while vLLM measures what is free.
        jax.block_until_ready(jax.numpy.zeros(1))
        assembly.start()
        return FleetClient(
            publisher=publisher, connect=assembly.connect, disconnect=assembly.disconnect, tokenizer=tokenizer, max_length=max_length,
            seeded=self.seeded, remove=self.spawn, adapted=alone, record=self._recording(policy) is not None, autoscale=self.autoscale, other=self._other(policy, tokenizer, max_length, run_dir),
        )  # fmt: skip

    def _other(self, policy: Policy, tokenizer: Any, max_length: int, run_dir: Path) -> Callable[[], Publisher] | None:
        """Returns the maker of a publisher by the other transfer, which local servers of one learner process on a GPU support; else None."""
        if self.transfer == "orbax" and not (self.spawn and jax.default_backend() == "gpu"):
            return None
        if jax.process_count() > 1 or self._alone(policy) is not None:
            return None
        other = replace(
            self, transfer="orbax" if self.transfer == "cuda_ipc" else "cuda_ipc", relay_port=0, relay_first=""
        )
        return lambda: other._publisher(policy, tokenizer, max_length, run_dir)

    def _publisher(self, policy: Policy, tokenizer: Any, max_length: int, run_dir: Path) -> Publisher:
        vocabulary = policy.architecture.vocabulary_size
        tokens = canary_tokens(self.canary, tokenizer, vocabulary)[: max_length - 1]
        folder = default_folder(self.publication, run_dir)
        if (adapted := self._alone(policy)) is not None:
            return AdapterPublisher(
                policy=adapted.plain, adapted=adapted, folder=folder, dtype=self.dtype, keep=self.keep, canary=tokens,
                base=_model_folder(run_dir) if self.spawn else None, tokenizer=tokenizer, tenant=self.tenant,
            )  # fmt: skip
        address = default_address(self.publication, run_dir)
        if self.relay_port and not address:
            address = f"file://{quote(str(folder))}"
        if address:
            return StorePublisher(
                policy=policy.plain, folder=folder, dtype=self.dtype, keep=self.keep, canary=tokens, address=address,
                quantization=self.quantization, relayed=bool(self.relay_port),
            )  # fmt: skip
        return Publisher(
            policy=policy.plain, folder=folder, dtype=self.dtype, keep=self.keep, canary=tokens, quantization=self.quantization,
            driver=Cuda() if self.transfer == "cuda_ipc" else None,
        )  # fmt: skip

    def _http(self, url: str, key: str, policy: Policy) -> VllmHttp:
        return VllmHttp(
            url=url, api_key=key, model=MODEL if self.spawn else self.model, proxied=self.proxied,
            vocabulary=policy.architecture.vocabulary_size, request_s=self.request_s, control_s=self.control_s,
            recording=self._recording(policy), adapters=self._alone(policy) is not None,
        )  # fmt: skip

    def _alone(self, policy: Policy) -> AdaptedPolicy | None:
        """Returns the policy where only its adapters are published, else None."""
        return policy if self.adapters and isinstance(policy, AdaptedPolicy) else None

    def _recording(self, policy: Policy) -> Recording | None:
        return Recording.of(policy.architecture) if self.record_routes else None

    def _relays(self) -> Relays | None:
        if not self.relay_port:
            return None
        token = os.environ.get(TOKEN_VARIABLE, "")
        check_token(token)
        return Relays(port=self.relay_port, token=token, first=self.relay_first)

    def _children(self, policy: Policy, tokenizer: Any, max_length: int, run_dir: Path) -> list[LocalServer]:
        """Returns the local servers, not started yet; writes the folder of their model, except where adapters are published beside a base."""
        model, config = _model_folder(run_dir), self.local
        more: tuple[str, ...] = ()
        if (adapted := self._alone(policy)) is not None:
            more = adapters.arguments(adapted.lora.rank)
            config = replace(config, environment={adapters.RUNTIME: "True", **config.environment})
        else:
            model.mkdir(parents=True, exist_ok=True)
            hf_weights.describe(policy.plain, model, tokenizer, dtype=self.dtype)
        scale_out = ("--enable-scale-out",) if self.local.release() >= (0, 30) else ()
        # Logits are float32, as the learner's are: in 16 bits those near 16 are 1/16 or 1/8 apart.
        head = () if self.dtype == "float32" else ("--hf-overrides", '{"head_dtype": "float32"}')
        record = () if self._recording(policy) is None else (FLAG,)
        narrow = ("--quantization", self.quantization) if self.quantization else ()
        arguments = (
            "--served-model-name", MODEL, "--dtype", self.dtype, *head, *record, *narrow, "--max-model-len", str(max_length),
            "--max-num-seqs", str(self.sequences), *scale_out, *more,
        )  # fmt: skip
        return [
            LocalServer(config=config, number=i, model=model, log=model.parent / f"server{i}.log", arguments=arguments)
            for i in range(self.local.count)
        ]


def _model_folder(run_dir: Path) -> Path:
    """Returns the folder of the model that a run's local servers serve."""
    return (run_dir / "vllm" / "model").absolute()
