"""How much time the gateway takes: `python -m tests.agents.time_gateway [--sessions 64] [--turns 8] [--delay_s 0] [--model FOLDER]`.

A scripted sampler answers in `delay_s`, so that all the rest is the gateway. The agents are in a process of their own, as real ones
are; each session is a conversation whose every turn adds an answer of `tokens` tokens and a message of `words` words.

With --model the sampler is the embedded one, which holds that Hugging Face folder: the sessions are played --times times through the gateway and
the same calls as often without it, by the token service in this process; `overhead` is how much longer the medians of the former are.
`kept_tokens` and `prefill_again_tokens` are tokens of earlier turns, of the last time through the gateway: those whose keys and values the
sampler still had, and those that it computed again.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from agents.gateways import SETTINGS, rendering
from agents.scripted import Scripted

from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.experience import Branch, SamplingParams


async def lags(late: list[float], busy: list[float], every_s: float = 0.005) -> None:
    """Notes by how much the event loop is late, and how long its thread has computed meanwhile, which others' load does not change."""
    while True:
        begin, before = time.perf_counter(), time.thread_time()
        await asyncio.sleep(every_s)
        late.append(time.perf_counter() - begin - every_s)
        busy.append(time.thread_time() - before)


async def scripted(given: argparse.Namespace) -> dict[str, Any]:
    made = rendering()
    said = [*made.tokenizer("number " * given.tokens, add_special_tokens=False)["input_ids"][: given.tokens - 1]]
    sampler = Scripted(lambda *_: [*said, made.stop_token_ids[0]], delay_s=given.delay_s)
    return (await served(given, TokenService(sampler, SETTINGS), made))[0]


async def served(
    given: argparse.Namespace, service: TokenService, made: Rendering
) -> tuple[dict[str, Any], list[Branch]]:
    """Opens the sessions, lets another process play them, and returns what both measured, and the conversations."""
    gateway = await Gateway().start(service, made)
    points = [gateway.endpoint(service.open(seed=i)) for i in range(given.sessions)]
    late, busy = list[float](), list[float]()
    command = [
        sys.executable,
        "-m",
        "tests.agents.time_gateway",
        "--play",
        "--turns",
        str(given.turns),
        "--words",
        str(given.words),
    ]
    playing = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    watch = asyncio.create_task(lags(late, busy))
    cpu, begin = time.process_time(), time.perf_counter()
    sent = json.dumps([[p.base_url, p.key] for p in points]).encode()
    output, _ = await playing.communicate(sent)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    watch.cancel()
    found = json.loads(output)
    branches = [session.branches() for session in service.sessions]
    assert all(len(b) == 1 and len(b[0].turns) == given.turns for b in branches), "a conversation is not one branch"
    await gateway.close()
    for session in service.sessions:
        session.close()
    times = np.asarray(found["seconds"]) - given.delay_s  # [sessions, turns]
    calls = given.sessions * given.turns
    drawn = sum(turn.end - turn.start for b in branches for turn in b[0].turns)
    measured = {
        "sessions": given.sessions,
        "turns": given.turns,
        "prompt_tokens_last_turn": int(len(branches[0][0].prefix) + len(branches[0][0].tokens) - given.tokens),
        "calls_per_s": round(calls / found["wall_s"], 1),
        "tokens_per_s": round(drawn / found["wall_s"]),
        "gateway_cpu_ms_per_call": round(1e3 * cpu / calls, 2),
        "latency_ms_p50": round(1e3 * float(np.median(times)), 1),
        "latency_ms_p99": round(1e3 * float(np.quantile(times, 0.99)), 1),
        "latency_ms_p50_by_turn": [round(1e3 * float(x), 1) for x in np.median(times, axis=0)],
        "loop_lag_ms_max": round(1e3 * max(late), 1),
        "loop_busy_ms_max": round(1e3 * max(busy), 1),
        "loop_busy_ms_p99": round(1e3 * float(np.quantile(busy, 0.99)), 1),
        "loop_lag_ms_p99": round(1e3 * float(np.quantile(late, 0.99)), 1),
        "wall_s": round(wall, 2),
        "played_s": round(found["wall_s"], 3),
    }
    return measured, [b[0] for b in branches]


async def continued(service: TokenService, branches: list[Branch]) -> float:
    """Seconds of the same calls without a gateway: each turn's prompt is given by its ids, and as many tokens are drawn."""

    async def one(seed: int, branch: Branch) -> None:
        session, begin = service.open(seed=seed), len(branch.prefix)
        ids = np.concatenate([branch.prefix, branch.tokens])
        for turn in branch.turns:
            await service.continue_(session, ids[: begin + turn.start], max_tokens=turn.end - turn.start)
        session.close()

    begin = time.perf_counter()
    await asyncio.gather(*(one(i, branch) for i, branch in enumerate(branches)))
    return time.perf_counter() - begin


async def embedded(given: argparse.Namespace) -> dict[str, Any]:
    """The embedded sampler through the gateway and without it."""
    import jax
    from transformers import AutoTokenizer

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models import hf_weights
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    partitioner = Partitioner.create(MeshConfig(), jax.devices()[:1])
    policy = Policy(hf_weights.architecture(given.model), partitioner, given.dtype)
    length = 64 + given.turns * (given.tokens + given.words + 32)
    sampler = EmbeddedSampler(slots=given.sessions).start(policy, tokenizer, max_length=length)
    await sampler.publish(hf_weights.load(policy, given.model), 0)
    service = TokenService(sampler, SamplingParams(max_tokens=given.tokens), at_once=given.sessions)
    with_it, without, counted = [], [], dict[str, float]()
    for _ in range(given.times + 1):  # the first compiles
        sampler.metrics()  # counts from here on
        measured, branches = await served(given, service, Rendering(tokenizer))
        counted = dict(sampler.metrics())
        with_it.append(measured["played_s"])
        without.append(await continued(service, branches))
        print(f"{with_it[-1]:.3f} s through the gateway, {without[-1]:.3f} s without it", file=sys.stderr, flush=True)
    await service.close()
    await sampler.close()
    medians = [statistics.median(seconds[1:]) for seconds in (with_it, without)]
    rows = {
        "device": jax.devices()[0].device_kind,
        "with_gateway_s": with_it,
        "without_s": [round(x, 3) for x in without],
        **{name: counted[f"sampler/{name}"] for name in ("kept_tokens", "prefill_again_tokens", "evicted_tokens")},
    }
    return measured | rows | {"overhead": round(medians[0] / medians[1] - 1, 4)}


async def play(turns: int, words: int) -> dict[str, Any]:
    """Plays the sessions that standard input names, all at once; every turn asks by the whole conversation, as agents do."""
    points = json.load(sys.stdin)
    said = "word " * words

    async def one(http: aiohttp.ClientSession, base: str, key: str) -> list[float]:
        messages, seconds = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": said}], []
        for _ in range(turns):
            begin = time.perf_counter()
            body = {"model": "policy", "messages": messages}
            async with http.post(
                f"{base}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as answer:
                assert answer.status == 200, await answer.text()
                message = (await answer.json())["choices"][0]["message"]
            seconds.append(time.perf_counter() - begin)
            messages += [message, {"role": "user", "content": said}]
        return seconds

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        begin = time.perf_counter()
        seconds = await asyncio.gather(*(one(http, base, key) for base, key in points))
        return {"seconds": seconds, "wall_s": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--words", type=int, default=50, help="of a message")
    parser.add_argument("--delay_s", type=float, default=0.0, help="that the sampler takes")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, which the embedded sampler holds")
    parser.add_argument("--dtype", default="bfloat16", help="of the model's computation")
    parser.add_argument("--times", type=int, default=3, help="with --model")
    parser.add_argument("--play", action="store_true", help="be the agents")
    given = parser.parse_args()
    if given.play:
        print(json.dumps(asyncio.run(play(given.turns, given.words))))
        return
    found = asyncio.run(embedded(given) if given.model else scripted(given))
    print(json.dumps(found | {"cpus": os.cpu_count()}, indent=1))


if __name__ == "__main__":
    main()
