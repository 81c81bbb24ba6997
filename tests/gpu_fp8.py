"""Publishes to a vLLM server that quantizes to fp8 what it loads, and compares it with one that was started from the same weights.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.3 PYTHONPATH=. python tests/gpu_fp8.py --model FOLDER --folder /dev/shm/fp8 --memory 0.3

FOLDER is a Hugging Face folder of a small model, such as Qwen2.5-0.5B. `--python` names the interpreter that has vLLM where that is another
one, `--python-path` a folder with its packages, `--quantization` one of fp8_per_channel, fp8_per_tensor and fp8_per_block. Prints a JSON
line for each comparison, and exits with 1 where the server that was updated is not as the fresh one. About two minutes on an H200.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.servers.local_server import LocalServer
from jaxrl_llm.samplers.servers.publisher import scored
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.sampler import VllmSampler
from jaxrl_llm.samplers.vllm.server_api import VllmHttp

TEXTS = (
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether? Let us add: 48 + 24 = 72.",
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total / len(numbers)\n",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. The capital of Japan is",
)
LENGTH = 512
SHOWN = ("tensors_checked", "tensors_unchecked", "tensors_quantized", "rounding", "canary_ratio", "canary_limit", "canary_mean",
         "stage_s", "commit_s", "paused_s")  # fmt: skip


def told(**values: Any) -> None:
    print(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}), flush=True)


def changed(params: Any, size: float) -> Any:
    """The weights with noise of a part of their own size, as after many updates."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + (size * jnp.std(x) * jax.random.normal(k, x.shape)).astype(x.dtype) for x, k in zip(leaves, keys)]
    return jax.tree.unflatten(tree, noisy)


async def said(http: VllmHttp, texts: Sequence[np.ndarray]) -> np.ndarray:
    """The log-probs of all texts' tokens but the first, by a server."""
    return np.concatenate([(await http.score(text, text[1:], 1))[0] for text in texts])


def by_learner(policy: Policy, params: Any, text: np.ndarray) -> np.ndarray:
    row = np.pad(text.astype(np.int32), (0, LENGTH - len(text)), constant_values=-1)
    return np.asarray(scored(params, row, policy=policy)[0])[: len(text) - 1].astype(np.float64)


def mean_apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean())


async def published(client: FleetClient, params: Any, version: int) -> None:
    """Brings the server to a version, and prints what it found."""
    await client.publish(params, version)
    await drawn(client, [np.arange(10, 20)], 1, 1)
    found = client.metrics()
    told(what="publication", version=version, **{name: found.get(f"publish/{name}", float("nan")) for name in SHOWN})


async def drawn(client: FleetClient, prompts: list[np.ndarray], count: int, most: int) -> list[tuple[int, Completion]]:
    seeds = list(range(len(prompts)))
    found = client.sample(prompts, count, SamplingParams(max_tokens=most), seeds)
    return [(index, one) async for index, group in found for one in group]


def gap_of(
    policy: Policy, params: Any, prompts: list[np.ndarray], samples: list[tuple[int, Completion]]
) -> dict[str, float]:
    """What importance weights have to correct: log rho = learner's - server's log-probs of what the server drew."""
    ratios = []
    for index, one in samples:
        text = np.concatenate([prompts[index], one.tokens])
        ratios.append(by_learner(policy, params, text)[-len(one.tokens) :] - np.asarray(one.logprobs))
    log_rho = np.concatenate(ratios)
    rho = np.exp(log_rho)
    return {
        "tokens": len(rho), "gap_mean": float(np.abs(log_rho).mean()), "gap_max": float(np.abs(log_rho).max()), "k3": float((rho - 1 - log_rho).mean()),
        "weight_mean": float(rho.mean()), "over_2": float((rho > 2).mean()), "effective": float(rho.mean() ** 2 / np.square(rho).mean()),
    }  # fmt: skip


async def fresh_scores(
    given: argparse.Namespace, sampler: VllmSampler, folder: Path, texts: list[np.ndarray]
) -> np.ndarray:
    """What a server says that vLLM itself started from a folder of weights."""
    arguments = (
        "--served-model-name", "policy", "--dtype", "bfloat16", "--hf-overrides", '{"head_dtype": "float32"}', "--load-format", "auto",
        "--max-model-len", str(LENGTH), "--max-num-seqs", "64", "--quantization", given.quantization,
    )  # fmt: skip
    scale_out = ("--enable-scale-out",) if sampler.local.release() >= (0, 30) else ()
    server = LocalServer(
        config=sampler.local, number=0, model=folder, log=given.folder / "fresh.log", arguments=(*arguments, *scale_out)
    )
    server.start()
    http = VllmHttp(url=server.url, api_key=server.key)
    try:
        await server.ready()
        http.url = server.url
        await http.open()
        return await said(http, texts)
    finally:
        await http.close()
        await server.stop()


async def run(given: argparse.Namespace) -> bool:
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    policy = Policy(hf_weights.architecture(given.model), Partitioner.create(MeshConfig()), "bfloat16")
    versions = [hf_weights.load(policy, given.model)]
    versions.append(changed(versions[0], given.noise))
    texts = [np.asarray(tokenizer.encode(text), np.int32) for text in TEXTS]
    sampler = VllmSampler(
        local=LocalServers(
            python=given.python, python_path=given.python_path, memory_share=given.memory, arguments=given.arguments.split()
        ),
        publication=str(given.folder), quantization=given.quantization, inflight="abort_resume", seeded=False, sequences=64,
        request_s=900.0, control_s=600.0, update_s=900.0, wait_s=900.0,
    )  # fmt: skip
    given.folder.mkdir(parents=True, exist_ok=True)
    other = given.folder / "other"
    hf_weights.save(policy, versions[1], other, tokenizer, dtype="bfloat16")
    client = sampler.start(policy, tokenizer, max_length=LENGTH, run_dir=given.folder)
    try:
        fresh = asyncio.create_task(fresh_scores(given, sampler, other, texts)) if given.together else None
        found = []
        for version in range(3):
            await published(client, versions[version % 2], version)
            found.append(await said(client._fleet.servers[0].http, texts))
            if version == 0:
                told(what="started", seconds=time.perf_counter() - began)
            if version == 1:
                prompts = [text[: len(text) // 2] for text in texts]
                samples = await drawn(client, prompts, 16, 128)
                told(what="gap", **gap_of(policy, versions[1], prompts, samples))
    finally:
        if not given.together:
            await client.close()
    said_fresh = await (fresh or fresh_scores(given, sampler, other, texts))
    if given.together:
        await client.close()
    exact = np.concatenate([by_learner(policy, versions[1], text) for text in texts])
    apart = {
        "updated_to_fresh": mean_apart(found[1], said_fresh), "updated_to_learner": mean_apart(found[1], exact),
        "other_version": mean_apart(found[0], found[1]), "back_again": mean_apart(found[0], found[2]), "positions": len(exact),
    }  # fmt: skip
    good = apart["updated_to_fresh"] < apart["updated_to_learner"] / 2 < apart["other_version"]
    good = good and apart["back_again"] < apart["updated_to_learner"] / 2
    told(what="same as fresh", good=good, seconds=time.perf_counter() - began, **apart)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--folder", type=Path, required=True, help="where weights are published, such as /dev/shm/fp8")
    parser.add_argument("--quantization", default="fp8_per_channel")
    parser.add_argument(
        "--noise", type=float, default=0.1, help="of the second version, as a part of the weights' size"
    )
    parser.add_argument("--python", default=None, help="the Python that has vLLM")
    parser.add_argument("--python-path", nargs="*", default=(), help="folders that hold vLLM and PyTorch")
    parser.add_argument(
        "--memory", type=float, default=None, help="share of the GPU's memory of each server, such as 0.2"
    )
    parser.add_argument("--arguments", default="", help="further arguments of the servers, in one text")
    parser.add_argument("--together", action="store_true", help="start both servers at once, on one GPU")
    raise SystemExit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
