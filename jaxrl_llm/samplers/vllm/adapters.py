"""Publishes adapters alone to vLLM servers: each version is loaded under a name of its own, beside earlier ones, while the server generates.

A request names its adapters and keeps them to its end, so nothing is paused, nothing in flight changes, and all tokens of a request are
of one version. No name is used twice: a server that knows it has its weights, and no mark of a commit is needed. A restarted server
does not know the name, answers 404, and is updated to the newest version again.

A name is RUN-VERSION-PUBLICATION, or TENANT~RUN-VERSION-PUBLICATION, with random digits for RUN, which a start of a learner draws anew.
Learners may share a server and its base: each unloads its own adapters alone, and those of former runs of its tenant, which is one
learner's name. vLLM lists the names at /v1/models.

The server loads the base at its start. It needs --enable-lora, --max-lora-rank, --max-loras (MAX_STALENESS + 2: vLLM
schedules no request of further adapters until all of one's are over), and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.

FOLDER/v00000012/ holds adapter_config.json, adapter_model.safetensors and manifest.json (version and canary); it appears complete or
not at all. One program converts all adapters on the devices, and process 0 writes them: they are a few hundredths of the weights.
"""

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxrl_llm.distributed import padding
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.models import hf_config, hf_format, hf_weights
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Params
from jaxrl_llm.publication.manifest import FILE, Manifest
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault
from jaxrl_llm.samplers.servers.publisher import Publisher, appearing
from jaxrl_llm.samplers.servers.server_http import ServerHttp

LOAD, UNLOAD, MODELS, METRICS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models", "/metrics"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
VERSIONS = 4  # whose requests share a batch: those of a staleness of 2, and the canary of the newest; more wait for the oldest to end
_TENANT = re.compile(r"[A-Za-z0-9_.]*")
# What vLLM's metrics say of adapters: the value is the time of the line.
_USED = re.compile(r"^vllm:lora_requests_info\{(.*)\}\s+(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)", re.MULTILINE)
_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank


def arguments(rank: int) -> tuple[str, ...]:
    """Returns a server's options for adapters of a rank, with room for VERSIONS of them.

    Raises:
      ValueError: vLLM takes no adapters of that rank.
    """
    fitting = [most for most in RANKS if most >= rank]
    if not fitting:
        raise ValueError(
            f"lora.LoRA.rank must be 1..{RANKS[-1]} for adapters in vLLM (got {rank}): lower it, or set vllm.VllmSampler.adapters = False"
        )
    return ("--enable-lora", "--max-lora-rank", str(fitting[0]), "--max-loras", str(VERSIONS), "--load-format", "auto")


def check_tenant(tenant: str, alone: bool) -> None:
    """Raises ValueError where a learner cannot have that name on servers; `alone` is whether it publishes adapters alone."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError(
            f"VllmSampler.tenant must be letters, digits, '_' and '.' alone, or empty, as it is part of adapters' names (got {tenant!r})"
        )
    if tenant and not alone:
        raise ValueError(
            f"VllmSampler.tenant names a learner's adapters on servers that several learners share (got {tenant!r} with adapters=False): "
            "set adapters = True (VLLM_ADAPTERS), or leave it empty"
        )


def run_named(tenant: str) -> str:
    """Returns a new name of a run, of a tenant or of none, for `named`."""
    return f"{tenant}~{secrets.token_hex(8)}" if tenant else secrets.token_hex(8)


def named(learner: str, version: int, publication: int) -> str:
    """Returns the name of a version's adapters.

    Args:
      learner: the run's name, of `run_named`.
      version: the number.
      publication: counts the learner's publications, of which one version may take several.
    """
    return f"{learner}-{version}-{publication}"


def version_named(name: str) -> int:
    """Returns the version in a name of adapters."""
    return int(name.rsplit("-", 2)[1])


async def load(http: ServerHttp, name: str, path: str) -> None:
    """Has a server load the adapters of a folder under a name; does nothing where it has loaded them.

    Raises:
      ServerFault, Refused: the server cannot; its earlier adapters stay.
    """
    if name in await _held(http):
        return
    try:
        await http.ask("POST", LOAD, {"lora_name": name, "lora_path": path})
    except Refused as refused:
        raise Refused(
            f"{refused}: adapters are read by the server from that folder, so it has to lie where both see it (vllm.VllmSampler.publication)",
            refused.status,
        ) from refused


async def unload_idle(http: ServerHttp) -> None:
    """Has a server unload the learner's adapters except the newest, where no request for them is in flight; and those that former runs
    of its tenant had there at the learner's first version, where no request for them runs or waits."""
    mine, _, _ = http.adapter.partition("-")
    busy = {name for name, flights in http.flying.items() if flights} | {http.adapter}
    held = await _held(http)
    if http.former is None:
        tenant, apart, _ = mine.partition("~")
        http.former = {
            name for name in held if apart and name.startswith(f"{tenant}~") and name.partition("-")[0] != mine
        }
    if former := http.former & held:
        busy |= await _used(http)
    for name in held:
        if (name.partition("-")[0] == mine or name in former) and name not in busy:
            with contextlib.suppress(Refused):  # the server has unloaded them already
                await http.ask("POST", UNLOAD, {"lora_name": name})
    for name in [name for name, flights in http.flying.items() if not flights]:
        del http.flying[name]


async def unload_all(http: ServerHttp, adapter: str, limit_s: float) -> None:
    """Has a server unload all adapters of the run to which `adapter` belongs, as far as it answers in `limit_s`; empty for no run."""
    if not adapter:
        return
    with contextlib.suppress(ServerFault, Refused, TimeoutError):
        async with asyncio.timeout(limit_s):
            for name in await _held(http):
                if name.partition("-")[0] == adapter.partition("-")[0]:
                    with contextlib.suppress(Refused):  # the server has unloaded them already
                        await http.ask("POST", UNLOAD, {"lora_name": name})


async def _held(http: ServerHttp) -> set[str]:
    """Returns the names of models and adapters that a server answers to."""
    text = await http.ask("GET", MODELS)
    try:
        return {str(model["id"]) for model in json.loads(text)["data"]}
    except (KeyError, TypeError, ValueError, RecursionError) as wrong:
        raise ServerFault(f"{http.url} does not list its models: {wrong!r}") from wrong


async def _used(http: ServerHttp) -> set[str]:
    """Returns the names of adapters of whatever learner for which requests run or wait, as far as the server's metrics say."""
    try:
        lines = _USED.findall(await http.ask("GET", METRICS))
    except Refused:
        return set()
    newest = max((float(value) for _, value in lines), default=0.0)
    lists = [names for labels, value in lines if float(value) == newest for names in _NAMES.findall(labels)]
    return {name for names in lists for name in names.split(",") if name}


# -- the learner's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class AdapterPublisher(Publisher):
    """Publishes versions of a policy's adapters as folders.

    Attributes:
      adapted: the policy with its adapters; `policy` is the plain one.
      base: folder to which the base is written before the first version, for servers that start from it; None where servers have the base.
      tokenizer: the tokenizer that is written beside the base.
      tenant: the learner's name among those that share the servers; empty for none.
    """

    adapted: AdaptedPolicy
    base: Path | None = None
    tokenizer: Any = None
    tenant: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._learner, self._count = run_named(self.tenant), 0
        self._stacked: dict[str, jax.Array] = {}
        self._manifest_text = ""

    def start(self, params: Params, version: int) -> tuple[Path, Manifest]:
        """Copies the adapters of `AdaptedPolicy.joined` parameters on the devices, and writes the base before the first version.

        Raises:
          OSError: a folder cannot be written, or is full; earlier versions stay complete.
        """
        self._begin, path = time.perf_counter(), self._path(version)
        adapters, base = taken_apart(params)
        try:
            if not self._count:
                self._clear(base)
        except OSError as error:
            raise self._unwritten("the base of adapters", error) from error
        self._count += 1
        stacked = exported_adapters(adapters, policy=self.adapted, dtype=self.dtype)
        for x in stacked.values() if jax.process_index() == 0 else ():
            x.copy_to_host_async()  # while the canary is computed
        manifest = Manifest(
            version=version, model_type=str(hf_config.write(self.policy.architecture)["model_type"]),
            tied=self.policy.architecture.tied, tensors={}, forward={}, canary=self._canary(params),
        )  # fmt: skip
        if jax.process_index() == 0:
            self._stacked, self._manifest_text = stacked, manifest.to_json()
        self.seconds["blocked_s"] = time.perf_counter() - self._begin
        return path, manifest

    async def finish(self, version: int) -> None:
        """Returns when the version is complete on disk; raises as `start` does."""
        if jax.process_index() == 0:
            try:
                await asyncio.to_thread(self._write, self._path(version))
            except OSError as error:
                raise self._unwritten(f"version {version}", error) from error
        self.seconds["save_s"] = time.perf_counter() - self._begin

    def adapter(self, version: int) -> str:
        """Returns the name of a version's adapters, which no other publication has."""
        return named(self._learner, version, self._count)

    def close(self, *, remove: bool) -> None:
        """Closes the publisher; with `remove`, removes the base too."""
        super().close(remove=remove)
        if remove and self.base is not None and jax.process_index() == 0:
            shutil.rmtree(self.base, ignore_errors=True)

    def _clear(self, base: Params) -> None:
        """Removes versions of an earlier run, and writes the base where servers start from it."""
        first = jax.process_index() == 0
        for path in (*self._versions(), *([self.base] if self.base else [])) if first else ():
            shutil.rmtree(path, ignore_errors=True)
        if self.base is not None:
            hf_weights.save(self.policy, base, self.base, tokenizer=self.tokenizer, dtype=self.dtype)

    def _write(self, path: Path) -> None:
        stacked, self._stacked = self._stacked, {}
        host = {name: to_host(x) for name, x in stacked.items()}
        named = {t.name: host["/".join(t.path)][t.layer] for t in hf_format.tensors(self.adapted.sizes())}
        with appearing(path) as partly:
            hf_weights.write_peft(self.adapted.lora, named, partly, None)
            (partly / FILE).write_text(self._manifest_text)


def taken_apart(params: Params) -> tuple[Params, Params]:
    """Splits parameters into adapters, a tree like Params with {"a", "b"} in the place of each adapted weight, and their base."""
    adapted = lambda x: isinstance(x, Adapted)  # noqa: E731
    base = jax.tree.map(lambda x: x.weights if adapted(x) else x, params, is_leaf=adapted)
    low: Params = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=adapted):
        if adapted(x):
            place = low
            for key in path:
                place = place.setdefault(key.key, {})
            place |= {"a": x.a, "b": x.b}
    return low, base


@partial(jax.jit, static_argnames=("policy", "dtype"))
def exported_adapters(adapters: Params, *, policy: AdaptedPolicy, dtype: str) -> dict[str, Float[Array, "..."]]:
    """Returns each adapter of all layers in PEFT's layout and in `dtype`, whole on every device, by the path of its leaf."""
    found, sizes = {}, policy.sizes()
    for tensor in hf_format.tensors(sizes):
        out, inner = tensor.hf_shape
        leaf = padding.cut(hf_format.leaf_of(adapters, tensor.path), hf_format.leaf_of(sizes, tensor.path).shape)
        stacked = leaf.reshape(leaf.shape[0], inner, out).swapaxes(1, 2).astype(dtype)
        whole = policy.partitioner.replicated
        found["/".join(tensor.path)] = jax.lax.with_sharding_constraint(stacked, whole)
    return found
