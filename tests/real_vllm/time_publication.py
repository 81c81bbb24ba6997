"""Times publications, from the end of an update to servers that serve it: random weights of a named shape, the learner's own path.

    PYTHONPATH=. python tests/real_vllm/time_publication.py --model qwen2.5-1.5b --tokenizer FOLDER --folder /dev/shm/publication

Run it where JAX is, one or several GPUs (parameters in float32, divided over them). `--python` names the interpreter that has vLLM,
where that is another one, and `--python-path` a folder with its packages; `--devices 2,3 --tensor-parallel 2` gives the server GPUs of
its own; on a shared one, set XLA_PYTHON_CLIENT_MEM_FRACTION. `--transfer cuda_ipc` leaves files out, `--rank 16` publishes adapters of that rank
beside a base in bfloat16, which the server loads at its start. Prints a line a publication; each is checked by the canary, the log-probs of a text under learner and server. The first one of each weights is slower: it compiles, and
locks pages of host memory.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from transformers import AutoTokenizer

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.vllm.local_server import LocalServers
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

SHOWN = (
    "blocked_s",
    "save_s",
    "stage_s",
    "paused_s",
    "commit_s",
    "total_s",
    "canary_ratio",
    "canary_limit",
    "canary_max",
)
LENGTH = 1024


async def timed(client: FleetClient, weights: list[dict], repeats: int, between_s: float) -> list[dict[str, float]]:
    """What each of `repeats` publications took, after one of each weights."""
    rows = []
    for version in range(repeats + len(weights)):
        await asyncio.sleep(between_s)
        began = time.perf_counter()
        await client.publish(weights[version % len(weights)], version)
        async for _ in client.sample([np.arange(10, 20)], 1, SamplingParams(max_tokens=1), [0]):
            pass  # requests wait for the new weights
        found = {name: client.metrics().get(f"publish/{name}", float("nan")) for name in SHOWN}
        rows.append({**found, "first_token_s": time.perf_counter() - began})
        print(f"  {version}: " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    return rows[len(weights) :]


def made(given: argparse.Namespace) -> tuple[Policy, list[Params], int]:
    """A policy, two versions of its weights, and the bytes of one that are published."""
    shared = (SHAPES[given.model], Partitioner.create(MeshConfig()), "bfloat16", "full")
    if not given.rank:
        policy = Policy(*shared)
        weights = [policy.init(jax.random.key(seed)) for seed in range(2)]
        return policy, weights, 2 * sum(x.size for x in jax.tree.leaves(weights[0]))
    policy = AdaptedPolicy(*shared, lora=LoRA(rank=given.rank, base_dtype="bfloat16"))
    base = policy.frozen(policy.plain.init(jax.random.key(0)))
    pairs = [
        jax.tree.map(lambda x: x + 0.01, policy.init(jax.random.key(seed))) for seed in range(2)
    ]  # B is 0 at first
    return policy, [policy.joined(x, base) for x in pairs], 2 * sum(x.size for x in jax.tree.leaves(pairs[0]))


async def run(given: argparse.Namespace) -> None:
    policy, weights, size = made(given)
    jax.block_until_ready(weights)
    sampler = VllmSampler(
        local=LocalServers(
            python=given.python, python_path=given.python_path, memory_share=given.memory, arguments=given.arguments.split(),
            tensor_parallel=given.tensor_parallel, devices=[given.devices] if given.devices else (),
        ),
        publication=str(given.folder), transfer=given.transfer, inflight="abort_resume", seeded=False, adapters=given.rank > 0,
    )  # fmt: skip
    given.folder.mkdir(parents=True, exist_ok=True)
    client = sampler.start(
        policy, AutoTokenizer.from_pretrained(given.tokenizer), max_length=LENGTH, run_dir=given.folder
    )
    try:
        rows = await timed(client, weights, given.repeats, given.between)
    finally:
        await client.close()
    medians = ", ".join(f"{name} {statistics.median(row[name] for row in rows):.3f}" for name in rows[0])
    print(f"{given.model}, {size / 1e6:.0f} MB, {len(jax.devices())} learner devices, {given.transfer}: {medians}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face folder with a tokenizer")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where weights are published, such as /dev/shm/publication"
    )
    parser.add_argument("--transfer", choices=["orbax", "cuda_ipc"], default="orbax")
    parser.add_argument("--rank", type=int, default=0, help="of LoRA adapters, which are published alone")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--between", type=float, default=5.0, help="seconds that updates take, while older versions go")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of the server, such as 2,3")
    parser.add_argument("--memory", type=float, default=0.4, help="share of a GPU's memory of the server")
    parser.add_argument("--arguments", default="", help="further arguments of the server's command line")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--python-path", nargs="*", default=[], help="folders with its packages")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
