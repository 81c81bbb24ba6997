"""Adapters alone, on vLLM servers: each version is loaded under a name of its own, beside those before it, while the server generates.

A request names the adapters that it asks for and keeps them to its end, so nothing is paused, nothing in flight changes, and all tokens of a
request are of one version. No name is given twice: a server that has it has its weights, and no mark of a commit is asked for. One that was
started anew does not know the name, answers 404, and is brought to the newest version again. Learners that name their adapters apart may
share a server and its base.

The server holds the base from its start. It needs --enable-lora, --max-lora-rank, --max-loras 2 or more, and the environment variable
VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.

FOLDER/v00000012/ holds adapter_config.json, adapter_model.safetensors and manifest.json (version and canary); it appears whole or not at
all. One program lays all adapters out on the devices, and process 0 writes them: they are a few hundredths of the weights.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.distributed import padding
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.models import hf_config, hf_format, hf_weights
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Params
from jaxrl_llm.publication.manifest import FILE, Manifest
from jaxrl_llm.samplers.vllm.answers import Refused, ServerFault
from jaxrl_llm.samplers.vllm.publisher import Publisher
from jaxrl_llm.samplers.vllm.server_api import LOAD, VllmHttp

UNLOAD, MODELS = "/v1/unload_lora_adapter", "/v1/models"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank


def arguments(rank: int) -> tuple[str, ...]:
    """The options of a server for adapters of a rank: two versions are in one batch while the older one's requests end.

    Raises:
      ValueError: vLLM takes no adapters of that rank.
    """
    fitting = [most for most in RANKS if most >= rank]
    if not fitting:
        raise ValueError(
            f"lora.LoRA.rank must be 1..{RANKS[-1]} for adapters in vLLM (got {rank}): lower it, or set vllm.VllmSampler.adapters = False"
        )
    return ("--enable-lora", "--max-lora-rank", str(fitting[0]), "--max-loras", "2", "--load-format", "auto")


def named(learner: str, version: int, publication: int) -> str:
    """The name of a version's adapters.

    Args:
      learner: hexadecimal digits of the learner's own.
      version: the number.
      publication: counts the learner's publications, of which one version may take several.
    """
    return f"{learner}-{version}-{publication}"


def version_named(name: str) -> int:
    """The version of adapters of this name."""
    return int(name.split("-")[1])


async def load(http: VllmHttp, name: str, path: str) -> None:
    """Has a server load the adapters of a folder under a name; does nothing where it has them.

    Raises:
      ServerFault, Refused: it cannot; what it had stays.
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


async def unload_idle(http: VllmHttp) -> None:
    """Has a server forget the learner's adapters but the newest, where nothing that asked for them is in flight."""
    mine, _, _ = http.adapter.partition("-")
    busy = {name for name, flights in http.flying.items() if flights} | {http.adapter}
    for name in await _held(http):
        if name.partition("-")[0] == mine and name not in busy:
            with contextlib.suppress(Refused):  # it has forgotten them by itself
                await http.ask("POST", UNLOAD, {"lora_name": name})
    for name in [name for name, flights in http.flying.items() if not flights]:
        del http.flying[name]


async def _held(http: VllmHttp) -> set[str]:
    """The names that a server answers to."""
    text = await http.ask("GET", MODELS)
    try:
        return {str(model["id"]) for model in json.loads(text)["data"]}
    except (KeyError, TypeError, ValueError, RecursionError) as wrong:
        raise ServerFault(f"{http.url} does not list its models: {wrong!r}") from wrong


# -- the learner's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class AdapterPublisher(Publisher):
    """Writes versions of a policy's adapters.

    Attributes:
      adapted: the policy with its adapters; `policy` is its plain one.
      base: folder that the base is written to before the first version, for servers that start from it; None where servers have it.
      tokenizer: written beside the base.
    """

    adapted: AdaptedPolicy
    base: Path | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._learner, self._count = secrets.token_hex(8), 0
        self._host: dict[str, np.ndarray] = {}
        self._manifest_text = ""

    def start(self, params: Params, version: int) -> tuple[Path, Manifest]:
        """Copies the adapters off the devices, where they are beside their base (`AdaptedPolicy.joined`), and before the first version writes the base.

        Raises:
          OSError: a folder cannot be written, or is full; earlier versions are whole.
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
        manifest = Manifest(
            version=version, model_type=str(hf_config.write(self.policy.architecture)["model_type"]),
            tied=self.policy.architecture.tied, tensors={}, forward={}, canary=self._canary(params),
        )  # fmt: skip
        if jax.process_index() == 0:
            self._host = {name: to_host(x) for name, x in stacked.items()}
            self._host = {t.name: self._host["/".join(t.path)][t.layer] for t in hf_format.tensors(adapters)}
            self._manifest_text = manifest.to_json()
        self.seconds["blocked_s"] = time.perf_counter() - self._begin
        return path, manifest

    async def finish(self, version: int) -> None:
        """Returns when the version is whole on disk; raises as `start` does."""
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
        """Ends as of any publisher; with `remove`, the base does not stay either."""
        super().close(remove=remove)
        if remove and self.base is not None and jax.process_index() == 0:
            shutil.rmtree(self.base, ignore_errors=True)

    def _clear(self, base: Params) -> None:
        """Removes versions of an earlier run, and writes the base anew where servers start from it."""
        first = jax.process_index() == 0
        for path in (*self._versions(), *([self.base] if self.base else [])) if first else ():
            shutil.rmtree(path, ignore_errors=True)
        if self.base is not None:
            hf_weights.save(self.policy, base, self.base, tokenizer=self.tokenizer, dtype=self.dtype)

    def _write(self, path: Path) -> None:
        partly = path.with_name(f".{path.name}.partial")
        for old in (partly, path):
            shutil.rmtree(old, ignore_errors=True)
        partly.mkdir(parents=True)
        hf_weights.write_peft(self.adapted.lora, self._host, partly, None)
        (partly / FILE).write_text(self._manifest_text)
        os.replace(partly, path)
        self._host = {}


def taken_apart(params: Params) -> tuple[Params, Params]:
    """Returns adapters, a tree like Params with {"a", "b"} in the place of each adapted weight, and their base."""
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
