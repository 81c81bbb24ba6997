"""A sampler that is told to go gives back what it had, and the one that comes in its place gets the newest weights first."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import VOCABULARY, FakeVllm
from fleet_cases import checked, running, until

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.servers import fleet as fleets
from jaxrl_llm.samplers.servers.local_server import free_port
from jaxrl_llm.serving import TOKEN_VARIABLE

TOKEN = "a token of more than sixteen letters"
ROOT = Path(__file__).parent.parent.parent


@asynccontextmanager
async def proxy(port: int, upstream: str):
    """The proxy's own process, ready; it is ended with the context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jaxrl_llm.samplers.vllm_proxy", "--server", upstream, "--port", str(port),
        cwd=ROOT, env={**os.environ, TOKEN_VARIABLE: TOKEN}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and b"Running" in await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("release", ["0.32.0", "0.26.0"])
def test_a_host_that_is_taken_away_loses_no_token_and_its_successor_is_brought_up_to_date(
    tiny, tmp_path, monkeypatch, release
):
    monkeypatch.setattr(fleets, "_HEARTBEAT_S", 0.05)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    goes, stays, comes = (FakeVllm(step_s=0.01, release=release) for _ in range(3))
    rng, ports = np.random.default_rng(0), (free_port(), free_port())
    prefixes = [rng.integers(0, VOCABULARY - 1, 4).astype(np.int32) for _ in range(16)]
    fields = {
        "urls": [f"http://127.0.0.1:{port}" for port in ports],
        "proxied": True,
        "api_key_variable": TOKEN_VARIABLE,
    }

    async def run():
        await asyncio.gather(*(server.start() for server in (goes, stays, comes)))
        async with (
            proxy(ports[0], goes.url) as leaving, proxy(ports[1], stays.url),
            running(tiny, tmp_path, [], listed=False, inflight="abort_resume", **fields) as client,
        ):  # fmt: skip
            await client.publish({}, 0)
            found = {}

            async def sample():
                settings = SamplingParams(max_tokens=40)
                async for index, group in client.sample(prefixes, 2, settings, list(range(len(prefixes)))):
                    assert index not in found
                    found[index] = group

            batch = asyncio.create_task(sample())
            await until(lambda: goes.drawn > 60)
            leaving.send_signal(signal.SIGTERM)
            await leaving.wait()
            assert leaving.returncode == 0 and not goes.active, "what was in flight is cut before the end"
            handed_back = goes.drawn
            await batch
            assert checked(prefixes, found) and sorted(found) == list(range(len(prefixes)))
            drawn = sum(len(one.tokens) for group in found.values() for one in group)
            assert handed_back + stays.drawn == drawn, "no token is drawn twice"
            counts = client.metrics()
            assert counts["sampler/left"] == 1 and counts["sampler/aborted"] > 0
            await client.publish({}, 1)
            async with proxy(ports[0], comes.url):
                await until(lambda: client._fleet is not None and len(client._fleet.balancer.serving()) == 2)
                assert comes.version == 1 and not comes.bodies
                await sample_again(client, [prefix + 1 for prefix in prefixes], found)  # no server had them before
                assert comes.bodies and set(np.concatenate([one.versions for g in found.values() for one in g])) == {1}
        await asyncio.gather(*(server.kill() for server in (goes, stays, comes)))

    async def sample_again(client, prefixes, found):
        found.clear()
        async for index, group in client.sample(prefixes, 2, SamplingParams(max_tokens=4), list(range(len(prefixes)))):
            found[index] = group

    async def limited():
        async with asyncio.timeout(60):
            await run()

    asyncio.run(limited())
