"""Measures publications to several sampler hosts over throttled links, and simulates the same: python tests/measure_publication.py [--hosts=1,2,4].

Each host is a network namespace (root, `ip` and `tc`) whose link has `--mb_s` each way, with a relay and a server that stages for real, checks, and
commits nothing. The learner's namespace has the store, so that what readers get of it is the learner's link. Rows of one host give the rates,
the others are predicted from them.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HELPERS = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("samplers", "publication"))]
sys.path[:0] = HELPERS

from relay_site import TOKEN  # noqa: E402

from jaxrl_llm.tools.planning.publication import Rates, seconds  # noqa: E402

PORT, RELAY = 8000, 9100
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "a-key-of-the-tests", "AWS_SECRET_ACCESS_KEY": "a secret of the tests", "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "JAXRL_LLM_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(HELPERS),
}  # fmt: skip
ROUTES = ("store", "relays, store", "relays, learner")


def address(number: int) -> str:
    return f"10.124.0.{number}"


@contextmanager
def network(hosts: int, mb_s: float) -> Iterator[list[str]]:
    """Namespaces of the learner and of hosts, joined by a switch; what each sends and gets is throttled."""
    names = [f"jaxrlp{os.getpid()}{i}" for i in range(hosts + 1)]
    switch, limit = names[0] + "s", ["root", "tbf", "rate", f"{mb_s * 8:g}mbit", "burst", "64kb", "latency", "300ms"]
    called = lambda *words: subprocess.run(words, check=True)  # noqa: E731
    try:
        for name in (switch, *names):
            called("ip", "netns", "add", name)
            called("ip", "-n", name, "link", "set", "lo", "up")
        called("ip", "-n", switch, "link", "add", "sw", "type", "bridge")
        called("ip", "-n", switch, "link", "set", "sw", "up")
        for i, name in enumerate(names):
            called("ip", "link", "add", f"p{i}", "netns", switch, "type", "veth", "peer", "name", "e", "netns", name)
            called("ip", "-n", switch, "link", "set", f"p{i}", "master", "sw", "up")
            called("ip", "-n", name, "addr", "add", f"{address(i + 1)}/24", "dev", "e")
            called("ip", "-n", name, "link", "set", "e", "up")
            for place, device in ((switch, f"p{i}"), (name, "e")):
                called("tc", "-n", place, "qdisc", "add", "dev", device, *limit)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def running(name: str, *words: str, **environment: str) -> Iterator[Callable[[], str]]:
    """A process in a namespace; gives what waits for the first line that it prints."""
    child = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | ENVIRONMENT | environment,
    )  # fmt: skip
    try:
        output = child.stdout
        assert output is not None
        yield lambda: output.readline().strip()
    finally:
        child.kill()
        child.communicate()


def relay(name: str, number: int, folder: Path, *more: str, **environment: str) -> Any:
    words = ["-m", "jaxrl_llm.publication.relays.server", "--folder", str(folder), "--host", address(number), *more]
    return running(name, *words, "--port", str(RELAY), "--least_mb_s", "1", **environment)


async def serve(number: int) -> None:
    """A sampler's server: vLLM's stand-in, with the real reader behind `stage`."""
    from aiohttp import web
    from fake_vllm import FakeVllm, answer

    from jaxrl_llm.publication.parts import Target, whole_box
    from jaxrl_llm.publication.reader import OrbaxReader, Stager

    class Staging(FakeVllm):
        stager = Stager()

        async def _collective_rpc(self, request: web.Request) -> web.Response:
            body = await request.json()
            if body.get("method") == "stage":
                path, version = body["kwargs"]["path"], int(body["kwargs"]["version"])
                tensors = (await asyncio.to_thread(OrbaxReader, path)).manifest.tensors
                targets = {n: Target(shape=t.shape, box=whole_box(t.shape)) for n, t in tensors.items()}
                self.stager.stage(path, version, targets)
            status = self.stager.status()
            self.staged = (status["version"], status["state"])
            if body.get("method") in ("stage", "stage_status"):
                return await answer({"results": [status | {"mark": self.mark}]})
            return await super()._collective_rpc(request)

    await Staging(host=address(number), port=PORT).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def learn(route: str, hosts: int, folder: Path, size: int) -> dict[str, float]:
    """Publishes two versions, the first of which compiles, and returns seconds of the second by part."""
    import jax

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.models.qwen3 import Qwen3
    from jaxrl_llm.samplers.vllm.sampler import VllmSampler

    model = Qwen3(vocabulary_size=8192, width=512, layers=size, heads=8, kv_heads=8, head_width=64, mlp_width=2048)
    policy = Policy(model, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    params = jax.block_until_ready(policy.init(jax.random.key(0)))
    learners = "learner" in route
    sampler = VllmSampler(
        spawn=False, urls=[f"http://{address(i + 2)}:{PORT}" for i in range(hosts)], canary="", update_s=600.0,
        publication=str(folder) if learners else "s3://bucket/run", relay_port=RELAY if "relays" in route else 0,
        relay_first=f"http://{address(1)}:{RELAY}" if learners else "",
    )  # fmt: skip
    client, found = sampler.start(policy, None, max_length=32, run_dir=folder), []
    for version in range(2):
        begin = time.perf_counter()
        await client.publish(params, version)
        assert client._publication is not None
        await client._publication
        told = client.metrics()
        parts = {name: value for name, value in told.items() if "publish" in name or "relay" in name}
        found.append(
            parts | {"whole": told["publish/save_s"] + told["publish/total_s"], "pruned": time.perf_counter() - begin}
        )
        assert told["sampler/servers"] == hosts and told["sampler/set_aside"] == 0, told
    await client.close()
    return found[1] | {"bytes": 2.0 * sum(x.size for x in jax.tree.leaves(params))}


def measured(route: str, hosts: int, mb_s: float, size: int) -> dict[str, float]:
    """One row: starts everything in its namespaces."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        names = stack.enter_context(network(hosts, mb_s))
        store = stack.enter_context(running(names[0], __file__, "--role=store"))()
        learners, waiting, more = top / "learner", [], {"AWS_ENDPOINT_URL": store}
        learners.mkdir()
        if "learner" in route:
            waiting.append(stack.enter_context(relay(names[0], 1, top / "r1", "--own", str(learners))))
        for i, name in enumerate(names[1:], 2):
            if "relays" in route:
                waiting.append(stack.enter_context(relay(name, i, top / f"r{i}", **more)))
            waiting.append(stack.enter_context(running(name, __file__, f"--role=server{i}", **more)))
        assert all(ready() for ready in waiting)
        words = [__file__, f"--role=learner{hosts}", f"--route={route}", f"--folder={learners}", f"--layers={size}"]
        return dict(json.loads(stack.enter_context(running(names[0], *words, **more))()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", default="1,2,4")
    parser.add_argument("--mb_s", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--role", default="")
    parser.add_argument("--route", default="")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.role == "store":
        from bucket import Bucket

        print(Bucket(address(1)).url, flush=True)
        time.sleep(3600)
    elif given.role.startswith("server"):
        asyncio.run(serve(int(given.role.removeprefix("server"))))
    elif given.role.startswith("learner"):
        hosts = int(given.role.removeprefix("learner"))
        print(json.dumps(asyncio.run(learn(given.route, hosts, given.folder, given.layers))), flush=True)
    else:
        compare([int(n) for n in given.hosts.split(",")], given.mb_s, given.layers)


def compare(hosts: list[int], mb_s: float, layers: int) -> None:
    """Prints seconds from the written version to the last server that has it, as measured and as simulated.

    The row of one host that reads the store gives the link, and that of one host with a relay the rate of staging from its folder.
    """
    rates = Rates(relay=1e12, read=1e12, load=1e12, gpus=1, learner_gpus=1)
    for route in ROUTES:
        for count in hosts:
            real = measured(route, count, mb_s, layers)
            nbytes, took = real["bytes"], real["publish/total_s"]
            if route == "store" and count == 1:
                link = nbytes / real["publish/stage_s"]
                rates = replace(rates, store=link, link=link, steps=took - real["publish/stage_s"])
            if route == "relays, store" and count == 1:
                rates = replace(rates, read=nbytes / (real["publish/stage_s"] - real["publish/relay_s"]))
            parts = seconds(nbytes, count, 1, route, rates)
            said = sum(parts.values()) - parts["write"]
            told = json.dumps({name.removeprefix("publish/"): round(value, 3) for name, value in real.items()})
            print(f"| {route} | {count} | {took:.2f} | {said:.2f} | {said / took - 1:+.1%} | {told}", flush=True)


if __name__ == "__main__":
    main()
