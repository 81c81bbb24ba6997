"""Measures publications to several sampler hosts over throttled links, and simulates the same: python tests/measure_publication.py [--hosts=1,2,3].

Each host is a network namespace (root, `ip` and `tc`) whose link has `--mb_s` each way, with a relay and a server that stages for real, checks, and
commits nothing. The learner's namespace has the store, so that what readers get of it is the learner's link. Of each version a share of `--changed`
differs from the one before. Rates of copies, digests and turns are measured by themselves (relay_rates.py), and the row of one host with nothing
changed gives those of staging and of calls; from these the other rows are predicted.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
HELPERS = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("samplers", "publication"))]
sys.path[:0] = HELPERS

from relay_rates import local_rates  # noqa: E402
from relay_site import TOKEN  # noqa: E402

from jaxrl_llm.publication.object_store import BLOCKS  # noqa: E402
from jaxrl_llm.publication.relays.blocks import _AHEAD_BYTES, _READS, blocks_of  # noqa: E402
from jaxrl_llm.publication.relays.version import _AT_ONCE  # noqa: E402
from jaxrl_llm.tools.planning.publication import Rates, seconds  # noqa: E402

PORT, RELAY = 8000, 9100
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "a-key-of-the-tests", "AWS_SECRET_ACCESS_KEY": "a secret of the tests", "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "JAXRL_LLM_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(HELPERS),
}  # fmt: skip
ROUTES = ("relays, store", "relays, learner", "store")
PAYLOAD = 1448 / 1514  # of a frame of Ethernet with TCP
_LARGE = 1 << 16  # bytes above which an object is one of weights


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


def next_of(params: Any, share: float) -> Any:
    """Returns parameters of which about that share, in whole layers that are evenly spread, has another sign; at 1, all of them."""
    import jax

    whole, stacked = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, params["layers"]))
    layers = len(params["layers"]["mlp_norm"]["scale"])
    count = layers if share == 1 else round(share * whole * layers / stacked)
    chosen = [(i + 1) * count // layers > i * count // layers for i in range(layers)]
    signs = jax.numpy.where(jax.numpy.array(chosen), -1.0, 1.0)

    def of(path: Any, x: Any) -> Any:
        in_layers = path[0].key == "layers"
        return x * (signs.reshape(-1, *[1] * (x.ndim - 1)) if in_layers else -1.0 if share == 1 else 1.0)

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(of, params))


async def learn(route: str, hosts: int, folder: Path, given: argparse.Namespace) -> list[dict[str, float]]:
    """Publishes a version that compiles, then some for each share of changed layers, and returns the seconds of these by part."""
    import jax

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.models.qwen3 import Qwen3
    from jaxrl_llm.samplers.vllm.sampler import VllmSampler

    model = Qwen3(
        vocabulary_size=8192, width=512, layers=given.layers, heads=8, kv_heads=8, head_width=64, mlp_width=2048
    )
    policy = Policy(model, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    params = jax.block_until_ready(policy.init(jax.random.key(0)))
    learners = "learner" in route
    sampler = VllmSampler(
        spawn=False, urls=[f"http://{address(i + 2)}:{PORT}" for i in range(hosts)], canary="", update_s=600.0,
        publication=str(folder) if learners else "s3://bucket/run", relay_port=RELAY if "relays" in route else 0,
        relay_first=f"http://{address(1)}:{RELAY}" if learners else "",
    )  # fmt: skip
    client, found = sampler.start(policy, None, max_length=32, run_dir=folder), []
    for version, share in enumerate([1.0, *(share for share in given.changed for _ in range(given.repeats))]):
        params = next_of(params, share)
        await client.publish(params, version)
        assert client._publication is not None
        await client._publication
        told = client.metrics()
        parts = {name: value for name, value in told.items() if "publish" in name or "relay" in name}
        found.append(parts | {"share": share, "bytes": 2.0 * sum(x.size for x in jax.tree.leaves(params))})
        assert told["sampler/servers"] == hosts and told["sampler/set_aside"] == 0, told
    await client.close()
    return found[1:]


def measured(route: str, hosts: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """The publications of a route: starts everything in its namespaces."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        names = stack.enter_context(network(hosts, given.mb_s))
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
        words = [__file__, f"--role=learner{hosts}", f"--folder={learners}", *sys.argv[1:], f"--routes={route}"]
        rates = local_rates() | {"load": os.getloadavg()[0]}
        rows = list(json.loads(stack.enter_context(running(names[0], *words, **more))()))
        listed = next((file.read_bytes() for file in top.glob(f"r2/*/{BLOCKS}")), b'{"objects": {}}')
        objects = [size for size, _ in json.loads(listed)["objects"].values()]
        rates["window"] = _AT_ONCE * _mean([block.nbytes for block in blocks_of(listed)])
        rates["ahead"] = min(_AHEAD_BYTES, _READS * _mean(objects))
        return [row | rates for row in rows]


def _mean(sizes: Sequence[int]) -> float:
    """Returns the mean of the sizes that are those of weights, and not of their descriptions; 1 where there are none."""
    return mean([size for size in sizes if size > _LARGE] or [1])


def predicted(
    row: Mapping[str, float], route: str, hosts: int, given: argparse.Namespace, first: Mapping[str, float]
) -> float:
    """Returns the simulated seconds of a row; `first` is that of one host with a relay to which nothing is new.

    All hosts have the same cores: each has its share of a local rate, and waits for the turns of all.
    """
    local, nbytes = {name: row[name] / hosts for name in ("copy", "digest", "relay")}, row["bytes"]
    read_s = first["publish/stage_s"] - first["publish/relay_s"]
    rates = Rates(
        link=given.mb_s * 1e6 * PAYLOAD, store=given.mb_s * 1e6 * PAYLOAD, gpus=1, learner_gpus=1,
        read=nbytes / read_s / hosts, load=1e12, steps=first["publish/total_s"] - read_s - nbytes / first["copy"],
        wait=row["wait"] * hosts, window=row["window"], ahead=row["ahead"], **local,
    )  # fmt: skip
    parts = seconds(nbytes, hosts, 1, route, rates, changed=row["share"])
    return sum(parts.values()) - parts["write"]


def compared(
    rows: Sequence[Mapping[str, float]], route: str, hosts: int, given: argparse.Namespace, first: Mapping[str, float]
) -> str:
    """Returns a line of the page's table for repeated publications."""
    of = lambda name: [row.get(name, 0.0) for row in rows]  # noqa: E731
    took, passed = of("publish/total_s"), of("publish/relay_source_bytes")[0] + of("publish/relay_passed_bytes")[0]
    real, said = median(took), median(predicted(row, route, hosts, given, first) for row in rows)
    sizes = f"{passed / hosts / 1e6:.1f} | {of('publish/relay_kept_bytes')[0] / hosts / 1e6:.1f}"
    error = "gives staging and calls" if hosts == 1 and not rows[0]["share"] else f"{said / real - 1:+.0%}"
    spread = f"{real:.2f} ({min(took):.2f} to {max(took):.2f})"
    return f"| {given.mb_s * 8:g} | {route} | {hosts} | {sizes} | {spread} | {said:.2f} | {error} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", default=[1, 2, 3], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--changed", default=[1.0, 0.25, 0.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mb_s", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--routes", default=ROUTES, type=lambda text: text.split("; "))
    parser.add_argument("--role", default="")
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
        print(json.dumps(asyncio.run(learn(given.routes[0], hosts, given.folder, given))), flush=True)
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    """Prints each publication as a line of JSON, and a line of the table for those of a route, of hosts and of a share."""
    first: Mapping[str, float] = {}
    for route in given.routes:
        for hosts in given.hosts:
            found = measured(route, hosts, given)
            for row in found:
                print(json.dumps({"route": route, "hosts": hosts, "mb_s": given.mb_s} | row), flush=True)
            if not first:
                first = middle([row for row in found if row["share"] == 0])
            for share in given.changed:
                print(compared([row for row in found if row["share"] == share], route, hosts, given, first), flush=True)


def middle(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Returns the medians of rows by name."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


if __name__ == "__main__":
    main()
