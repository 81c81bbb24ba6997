"""Relays of a site: processes of their own on addresses of loopback, and relays of this process whose patience a test sets."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

from jaxrl_llm.publication.manifest import WEIGHTS
from jaxrl_llm.publication.object_store import MARKER, Store
from jaxrl_llm.publication.relays.server import Relay
from jaxrl_llm.publication.relays.version import Announcement, Patience

TOKEN = "a token of the tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ROOT = Path(__file__).parents[1]
QUICK = Patience(silent_s=3.0, block_s=20.0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def contents(sizes: Mapping[str, int], seed: int = 0) -> dict[str, bytes]:
    """Objects of random bytes below the folder of the weights."""
    rng = random.Random(seed)
    return {f"{WEIGHTS}/{name}": rng.randbytes(size) for name, size in sizes.items()}


def address(folder: Path) -> str:
    return f"file://{quote(str(folder))}"


def written(store: str, version: int, objects: Mapping[str, bytes]) -> Announcement:
    """Writes a version as a learner of one process does, and returns what relays are told of it."""
    one, name = Store(store), f"v{version:08d}"
    one.write(name, {key: partial(bytes, content) for key, content in objects.items()}, 0, listed=True)
    return Announcement(version=version, source=f"{store}/{name}", blocks=one.complete(name, 1, 10))


def changed(objects: dict[str, bytes], key: str, place: int) -> dict[str, bytes]:
    """The objects with one bit of one of them flipped."""
    content = bytearray(objects[key])
    content[place] ^= 1
    return objects | {key: bytes(content)}


def same(folder: str | Path, objects: dict[str, bytes]) -> None:
    """The folder holds the objects, byte for byte, and the marker of a whole version."""
    for key, content in objects.items():
        assert (Path(folder) / key).read_bytes() == content, key
    assert (Path(folder) / MARKER).read_bytes() == b"{}"


def relay(tmp_path: Path, **fields: Any) -> Relay:
    return Relay(folder=tmp_path / "relay", token=TOKEN, **({"patience": QUICK} | fields))


class Process:
    """A relay that runs as a process of its own on 127.0.0.HOST."""

    def __init__(self, folder: Path, host: int, port: int, *options: str) -> None:
        self.url, self.folder = f"http://127.0.0.{host}:{port}", folder
        self._made = (folder, host, port, *options)
        command = [sys.executable, "-m", "jaxrl_llm.publication.relays.server", "--folder", str(folder)]
        self.child = subprocess.Popen(
            [*command, "--host", f"127.0.0.{host}", "--port", str(port), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"JAXRL_LLM_TOKEN": TOKEN},
        )  # fmt: skip

    def ready(self) -> "Process":
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert "Running on" in line, line
        return self

    def again(self) -> "Process":
        """The same relay, started once more after it ended."""
        self.end()
        return Process(*self._made).ready()

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()


@asynccontextmanager
async def beside(relay: Relay) -> AsyncIterator[str]:
    """A relay of this process; gives its address."""
    async with serving(relay.application()) as url:
        yield url


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def announce(url: str, said: Announcement) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(f"{url}/announce", json=said.content()) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def status(url: str, name: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(headers=HEADERS) as session, session.get(f"{url}/{name}") as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def ended(url: str, said: Announcement) -> dict[str, Any]:
    """Announces a version to a relay and returns its status once it is whole or failed."""
    until, found = time.monotonic() + 60, await announce(url, said)
    while found["state"] == "fetching":
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
        found = await status(url, said.id)
    return found
