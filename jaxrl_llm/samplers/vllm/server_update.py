"""The update of one vLLM server to a published version of the weights.

Stage while it generates -> every rank has staged -> pause -> commit -> label the version -> resume -> canary -> take requests
again. vLLM scores nothing while it is paused, so the canary comes after `resume`, with the door still shut to new requests; where
it fails, the server is paused again and what it drew from the new weights is thrown away. A server whose commit failed is never
resumed: it stays paused until a later update of it is whole.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxrl_llm.publication.manifest import Canary
from jaxrl_llm.samplers.vllm.server_api import ServerFault, VllmHttp

Inflight = Literal["recompute", "stale_kv", "wait", "abort_resume"]
# What becomes of requests in flight while weights change: vLLM's pause mode, and whether it forgets keys and values.
PAUSES: dict[str, tuple[str, bool]] = {
    "recompute": ("keep", True),
    "stale_kv": ("keep", False),
    "wait": ("wait", True),
    "abort_resume": ("abort", True),
}
_POLL_S = 0.02
_HELD_S = 5.0  # after a pause, in which what a server has drained arrives


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version of the weights that servers can stage.

    Attributes:
      path: where it lies, as the servers see it.
      version: its number.
      canary: what the learner says of a fixed sequence, or None.
      memory: where it lies in the learner's GPU memory, as `cuda_ipc.share` says it; empty where it is read from `path`.
    """

    path: str
    version: int
    canary: Canary | None = None
    memory: str = ""


@dataclass(eq=False, kw_only=True)
class Server:
    """A server and what is known of it.

    Attributes:
      http: its connection.
      revive: starts it anew where it ended, if it is a child of this process.
      ready: it answers, and its last update was whole.
      shut: it is in an update; no new requests.
      load: sequences in flight.
      served: it has taken requests before.
      strikes: requests in a row that took too long.
      cause: why it is not ready, or where its update is.
      told: the cause that was last warned of, of a server that is to be taken in.
      suspect: a version whose tokens are thrown away, or None.
      flights: requests in flight.
      held: those of them that reached it when it was paused already, cut off to be asked again.
      lock: held by whoever updates it.
    """

    http: VllmHttp
    revive: Callable[[], Awaitable[None]] | None = None
    ready: bool = False
    shut: bool = False
    load: int = 0
    served: bool = False
    strikes: int = 0
    cause: str = "not reached yet"
    told: str = ""
    suspect: int | None = None
    flights: set[asyncio.Task[None]] = field(default_factory=set)
    held: set[asyncio.Task[None]] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def stage(server: Server, published: Published) -> None:
    """Has every rank read a version, while the server generates.

    Raises:
      ServerFault, Refused: a rank cannot; the server goes on with what it has.
    """
    if not published.memory:
        server.cause = "staging"
        await server.http.stage(published.path, published.version)
        await _staged(server.http, published.version)


async def swap(server: Server, published: Published, inflight: Inflight, limit_s: float) -> dict[str, float]:
    """Brings a server to the version that it has staged; it is left shut to new requests, for the caller to open.

    Args:
      inflight: what becomes of requests in flight.
      limit_s: most seconds until what is in flight has ended, where it has to.

    Returns:
      Seconds between pause and resume, and from the pause's end to resume; and the canary's gap.

    Raises:
      ServerFault, Refused: a step failed; the server is as the step left it.
    """
    http, begin = server.http, time.perf_counter()
    server.cause, server.shut = "pausing", True
    mode, clear = PAUSES[inflight]
    await http.pause(mode, clear_cache=clear, limit_s=limit_s)
    await _quiet(server, drained=mode != "keep", streams=streamed(server, inflight))
    server.cause = "committing"
    paused = time.perf_counter()
    await _commit(http, published)
    await http.label(published.version)
    http.version = published.version
    await http.resume()
    resumed = time.perf_counter()
    server.cause = "canary"
    return {"paused_s": resumed - begin, "commit_s": resumed - paused} | await _canary(server, published)


def streamed(server: Server, inflight: Inflight) -> bool:
    """Whether a server's tokens are taken as they are drawn, because nothing else tells their versions."""
    return inflight in ("recompute", "stale_kv") and not server.http.spans


async def _commit(http: VllmHttp, published: Published) -> None:
    """Loads the version on every rank; raises ServerFault, with the ranks' reasons, where one holds another."""
    version, memory = published.version, published.memory
    held = await (http.commit_memory(version, memory) if memory else http.commit(version))
    reasons = sorted({str(rank["error"]) for rank in held if rank.get("error")})
    if not held or reasons or any(int(rank.get("version", -1)) != version for rank in held):
        versions = [rank.get("version") for rank in held]
        raise ServerFault(
            f"{http.url} holds version {versions} after the commit of {version} ({'; '.join(reasons) or 'no reason given'}): it stays paused"
        )


async def _staged(http: VllmHttp, version: int) -> None:
    """Returns when every rank has staged the version; ServerFault where one failed."""
    while True:
        if not (ranks := await http.stage_status()):
            raise ServerFault(
                f"{http.url} names no rank that stages version {version}: was vLLM started with the worker extension?"
            )
        for rank in ranks:
            if rank.get("state") == "failed":
                raise ServerFault(f"{http.url} could not stage version {version}: {rank.get('error')}")
            if int(rank.get("version", version)) != version:
                raise ServerFault(
                    f"{http.url} stages version {rank.get('version')} and not {version}: does another learner update it?"
                )
        if all(rank.get("state") == "staged" for rank in ranks):
            return
        await asyncio.sleep(_POLL_S)


async def _quiet(server: Server, *, drained: bool, streams: bool) -> None:
    """Returns when nothing that the old weights drew is on its way: no request at all, or no token for a while.

    A request that reached the server after its pause waits there for the resume, which waits for it: it is cut off.
    """
    until = time.monotonic() + _HELD_S
    while drained and server.flights:
        if time.monotonic() > until:
            server.held |= {flight for flight in server.flights if flight.cancel()}
        await asyncio.sleep(_POLL_S)
    seen = -1
    while streams and seen != (now := server.http.arrivals):
        seen = now
        await asyncio.sleep(2 * _POLL_S)


async def _canary(server: Server, published: Published) -> dict[str, float]:
    """Compares the server's log-probs of the fixed sequence with the learner's.

    Raises:
      ServerFault: they differ by more than the tolerance; the server is paused and its tokens are suspect.
    """
    canary = published.canary
    if canary is None:
        return {}
    gap = np.abs(await server.http.score(canary.tokens) - np.asarray(canary.logprobs))
    mean, worst = float(gap.mean()), float(gap.max())
    if mean <= canary.mean_tolerance and worst <= canary.max_tolerance:
        return {"canary_mean": mean, "canary_max": worst}
    server.suspect = published.version
    await server.http.pause("abort", clear_cache=True)
    raise ServerFault(
        f"{server.http.url} scores the canary {mean:.3g} nats a token (at most {worst:.3g}) off the learner under version "
        f"{published.version}; allowed are {canary.mean_tolerance:g} and {canary.max_tolerance:g} "
        "(VllmSampler.canary_mean and canary_max): is it the same model and dtype?"
    )
