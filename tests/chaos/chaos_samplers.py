"""Samplers that are killed, hang or answer garbage, and clocks that jump, while weights change: every sample once and of its version."""

import ast
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from chaos_table import Row, Stopwatch, Trial
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import checked, running, until
from sampler_cases import SIZES, Tiny

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.servers import fleet as fleets
from jaxrl_llm.samplers.servers import server_http
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.samplers.vllm import server_api

SERVERS, PROMPTS, SAMPLES = 3, 24, 3
SETTINGS = SamplingParams(max_tokens=12)
LIMITS: dict[str, Any] = {
    "request_s": 2.0, "control_s": 2.0, "update_s": 3.0, "wait_s": 60.0, "straggler_s": 0.3, "straggler": 3.0, "sequences": 64, "tries": 50,
}  # fmt: skip
NOISE = (
    b"", b"{", b"null", b"[]", b'{"choices": null}', b'{"choices": []}', b"<html>502 Bad Gateway</html>", b'{"choices": [7, 8, 9]}',
    b'{"choices": [{"index": 99, "token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": NaN}]}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}]}',
    b'{"choices": [{"index": 0, "token_ids": [-1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length"}]}',
    b'{"results": [{"version": "x"}]}', b'{"results": [7]}', b'{"results": [{"version": 3, "state": "staged"}]}',
    b'{"choices": [{"index": -1, "token_ids": ["1"], "logprobs": {"content": [{"logprob": "x"}]}, "finish_reason": "stop"}]}',
)  # fmt: skip


@cache
def tiny() -> Tiny:
    """The policy that a client is made for; the servers' toy is another, so it needs no parameters."""
    return Tiny(policy=Policy(SIZES, Partitioner.create(MeshConfig(), jax.devices()[:1]), "float32"), params={})


@contextmanager
def quick_heart() -> Iterator[None]:
    """A fleet looks after its servers twenty times a second, and gives up sooner on those that do not answer."""
    with (
        patch.object(fleets, "_HEARTBEAT_S", 0.05),
        patch.object(server_http, "CONNECT_S", 0.5),
        patch.object(server_api, "CONNECT_S", 0.5),
    ):
        yield


def prefixes(rng: random.Random) -> list[np.ndarray]:
    return [
        np.array([rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))], np.int32) for _ in range(PROMPTS)
    ]


async def sampled(client: FleetClient, rng: random.Random) -> int:
    """Samples of a batch; each is compared with the table of each token's version."""
    asked = prefixes(rng)
    found: dict[int, list[Any]] = {}
    async for index, group in client.sample(asked, SAMPLES, SETTINGS, [rng.randrange(1 << 60) for _ in asked]):
        assert index not in found, "a group came twice"
        found[index] = group
    checked(asked, found)
    return sum(len(group) for group in found.values())


Change = Callable[[FakeVllm], Awaitable[None]]


def struck(trial: Trial, break_it: Callable[[FakeVllm, random.Random], Awaitable[None]], mend: Change) -> Row:
    """Breaks a server in the middle of a batch, brings new weights in the middle of it all, and mends it again."""
    rng = random.Random(trial.seed)

    async def run() -> Row:
        row = Row(tried=trial.times, outcome="")
        servers = [FakeVllm(step_s=0.006, release=rng.choice(("0.32.0", "0.26.0"))) for _ in range(SERVERS)]
        async with running(
            tiny(), trial.folder, servers, inflight=rng.choice(("recompute", "abort_resume")), **LIMITS
        ) as client:
            await client.publish({}, 0)
            await sampled(client, rng)
            for version in range(1, trial.times + 1):
                broken = rng.choice(servers)
                await client.publish({}, 2 * version)
                batch = asyncio.create_task(sampled(client, rng))
                if rng.random() < 0.5:  # while requests are on their way, or before they are asked
                    await asyncio.sleep(rng.uniform(0, 0.08))
                await break_it(broken, rng)
                if rng.random() < 0.5:
                    row.into, row.out = row.into + PROMPTS * SAMPLES, row.out + await sampled(client, rng)
                await client.publish({}, 2 * version + 1)
                row.into += 2 * PROMPTS * SAMPLES
                row.out += await batch + await sampled(client, rng)
                watch = Stopwatch()
                await mend(broken)
                assert client._fleet is not None
                serving = client._fleet.balancer.serving
                await until(lambda serving=serving: len(serving()) == SERVERS)
                row.recovered_s.append(watch.seconds)
            found = client.metrics()
        names = ("retries", "stalled", "set_aside", "rejoined")
        row.outcome = "no sample lost or doubled; " + ", ".join(f"{n} {found[f'sampler/{n}']:.0f}" for n in names)
        return row

    with quick_heart():
        return asyncio.run(run())


def killed(trial: Trial) -> Row:
    async def kill(server: FakeVllm, rng: random.Random) -> None:
        await server.kill()

    async def start(server: FakeVllm) -> None:
        await server.start()

    return struck(trial, kill, start)


def hung(trial: Trial) -> Row:
    async def hang(server: FakeVllm, rng: random.Random) -> None:
        server.slow["*"] = 60.0

    async def go_on(server: FakeVllm) -> None:
        server.slow.clear()

    return struck(trial, hang, go_on)


def garbage(trial: Trial) -> Row:
    async def answer_noise(server: FakeVllm, rng: random.Random) -> None:
        server.noise = rng.choice(NOISE)

    async def answer_samples(server: FakeVllm) -> None:
        server.noise = None

    return struck(trial, answer_noise, answer_samples)


def mislabelled(trial: Trial) -> Row:
    """A server holds other weights than its label says: it was started anew unnoticed, another learner updated it, or an old commit came late.

    It happens when every server serves the newest version, before requests or in the middle of their tokens.
    """
    rng, late = random.Random(trial.seed), dict[FakeVllm, tuple[int, str]]()

    async def change_weights(server: FakeVllm) -> None:
        how, before = rng.choice(("anew", "another's", "late")), (server.version, server.mark)
        if how == "anew":
            await server.kill()
            await server.start()
        elif how == "late" and server in late:
            server.version, server.mark = late[server]
        else:
            server.version, server.mark = rng.randrange(1000, 1100), "another's"
        late[server] = before

    async def run() -> Row:
        row = Row(tried=trial.times, outcome="")
        servers = [FakeVllm(step_s=0.006, release=rng.choice(("0.32.0", "0.26.0"))) for _ in range(SERVERS)]
        inflight = rng.choice(("recompute", "abort_resume"))
        async with running(tiny(), trial.folder, servers, inflight=inflight, **LIMITS) as client:
            for version in range(trial.times):
                broken = rng.choice(servers)
                await client.publish({}, version)
                row.out += await sampled(client, rng)
                assert client._fleet is not None
                serving = client._fleet.balancer.serving
                await until(lambda serving=serving: len(serving()) == SERVERS)
                batch = asyncio.create_task(sampled(client, rng))
                if rng.random() < 0.7:
                    wanted = len(broken.begun) + rng.randrange(1, 8)
                    await until(lambda n=wanted, at=broken, task=batch: len(at.begun) >= n or task.done())
                await change_weights(broken)
                row.into += 3 * PROMPTS * SAMPLES
                row.out += await batch + await sampled(client, rng)
                watch = Stopwatch()
                await until(lambda serving=serving: len(serving()) == SERVERS)
                row.recovered_s.append(watch.seconds)
            found = client.metrics()
        row.outcome = f"no token of other weights than its label's; retries {found['sampler/retries']:.0f}, set_aside {found['sampler/set_aside']:.0f}"
        return row

    with quick_heart():
        return asyncio.run(run())


def clock_jump(trial: Trial) -> Row:
    """time.time goes days forth and back at every call; nothing that waits may look at it."""
    rng, real, calls = random.Random(trial.seed), time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return real() + rng.uniform(-10, 10) * 86_400

    async def run() -> Row:
        row, watch = Row(tried=trial.times, outcome=""), Stopwatch()
        servers = [FakeVllm(step_s=0.003) for _ in range(SERVERS)]
        async with running(tiny(), trial.folder, servers, wait_s=60.0) as client:
            for version in range(trial.times):
                await client.publish({}, version)
                row.into += PROMPTS * SAMPLES
                row.out += await sampled(client, rng)
            found = client.metrics()
        assert not any(found[f"sampler/{n}"] for n in ("retries", "slow", "set_aside", "late_updates")), found
        row.outcome = f"nothing noticed in {watch.seconds:.1f} s"
        return row

    with quick_heart(), patch.object(time, "time", jumping):
        return asyncio.run(run())


def no_wait_reads_the_calendar(package: Path) -> list[str]:
    """Places of a package where the calendar's time is compared or subtracted, as a wait would."""
    found = []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.BinOp) and any(
                isinstance(inner, ast.Call)
                and ast.unparse(inner.func) in ("time.time", "datetime.now", "datetime.datetime.now")
                for inner in ast.walk(node)
            ):
                found.append(f"{file}:{node.lineno} {ast.unparse(node)[:80]}")
    return found
