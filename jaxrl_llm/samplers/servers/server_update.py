"""Updates one server to a published version of the weights.

Stage while it generates -> every rank has staged -> pause -> commit -> label the version -> resume -> canary -> take requests again.
A server scores nothing while it is paused, so the canary comes after `resume`, while the server still gets no new requests; where it fails,
the server is paused again and its tokens from the new weights are discarded. A server whose commit failed is never resumed: it stays
paused until a later update of it succeeds.

A version of adapters is loaded beside the one before, without a pause: `adapters`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.publication.canary import LISTED, gap
from jaxrl_llm.publication.manifest import Canary
from jaxrl_llm.samplers.servers.answers import Refused, ServerFault, check_quantization
from jaxrl_llm.samplers.servers.server_http import ServerHttp

_log = logging.getLogger(__name__)
Inflight = Literal["recompute", "stale_kv", "wait", "abort_resume"]
# Treatment of requests in flight while weights change: vLLM's pause mode, and whether its keys and values are dropped.
PAUSES: dict[str, tuple[str, bool]] = {
    "recompute": ("keep", True),
    "stale_kv": ("keep", False),
    "wait": ("wait", True),
    "abort_resume": ("abort", True),
}
_POLL_S, _LONGEST_POLL_S = 0.02, 0.5  # seconds between requests for a server's progress, each 1.5 times the last
_SILENCE_S = 0.04  # seconds without an arrival after which nothing is on its way
_LOOKS = 4  # checks that find a server unchanged before it counts as hung
_HELD_S = 5.0  # seconds after a pause in which the answers of a drained server arrive


@dataclass(eq=False, kw_only=True)
class Marks:
    """The marks of one server, by which it is checked that it still holds the weights that this learner committed last.

    A version's number does not suffice. A restarted server, one that carries out a commit late, after its client had given up, and one
    that another learner updates all answer requests as before, from other weights. So each commit carries a random mark, which the
    server's plugin keeps beside the weights. An answer counts once the server, asked after the answer's last token has arrived, has
    named the mark of the last commit; and a commit returns the mark before it, for the requests that go on across it.

    Attributes:
      http: the server.
      held: the mark of the last successful commit; empty where the server's weights are unknown.
      coming: the mark of a commit in progress; empty for none.
    """

    http: ServerHttp
    held: str = ""
    coming: str = ""
    _asking: asyncio.Future[set[str]] | None = field(default=None, init=False)
    _next: asyncio.Future[set[str]] | None = field(default=None, init=False)

    def new(self) -> str:
        """Returns a new mark for a commit that begins now."""
        self.coming = uuid.uuid4().hex
        return self.coming

    def settle(self) -> None:
        """Records that the commit succeeded."""
        self.held, self.coming = self.coming, ""

    def forget(self) -> None:
        """Records that the server's weights are unknown."""
        self.held = self.coming = ""

    async def confirm(self) -> None:
        """Returns if the server, asked after this call, holds the last committed weights, or those of the commit in progress.

        With adapters it asks nothing, since each request names its adapters.

        Raises:
          ServerFault: the server holds other weights, or does not answer.
        """
        if self.http.adapters:
            return
        found = await self._found()
        if not found or not found <= {self.held, self.coming} - {""}:
            raise ServerFault(
                f"{self.http.url} holds other weights than this learner committed last: it was started anew, carried out a commit "
                "that came late, or another learner updates it"
            )

    async def _found(self) -> set[str]:
        """Returns the marks of the server's ranks; waiting callers share the next request, which begins when the present one is answered."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask(self._asking))
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Future[set[str]] | None) -> set[str]:
        if before is not None:
            await asyncio.wait([before])
        self._asking, self._next = self._next, None
        return {str(rank.get("mark", "")) for rank in await self.http.stage_status()}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version of the weights that servers can stage.

    Attributes:
      path: its path or address, as the servers see it.
      version: its number.
      canary: the learner's log-probs of a fixed sequence, or None.
      memory: its place in the learner's GPU memory, as `cuda_ipc.share` returns it; empty where it is read from `path`.
      adapter: the name of the version's adapters, which alone lie at `path`; empty where all weights do.
      quantization: how servers quantize the weights that they load; empty where they keep them as published.
      source: the address at which relays find it.
      blocks: digest of the list of its blocks, for relays; empty where none are listed.
    """

    path: str
    version: int
    canary: Canary | None = None
    memory: str = ""
    adapter: str = ""
    quantization: str = ""
    source: str = ""
    blocks: str = ""


class Apart(ServerFault):
    """Raised where a server's scores of the canary differ from the learner's."""


@dataclass(eq=False, kw_only=True)
class Progress:
    """The progress of a server in drawing tokens.

    Attributes:
      tokens: number of tokens that it had read and drawn at the last check; None before a check with requests in flight.
      since: when that number changed, time.monotonic.
      moved: whether the number has ever changed, or a request was answered, since the first requests may wait for programs to compile.
      looks: number of checks that found it unchanged, since a busy client checks seldom.
      uncounted: whether a line has said that the server does not count its tokens.
    """

    tokens: float | None = None
    since: float = 0.0
    moved: bool = False
    looks: int = 0
    uncounted: bool = False

    def rest(self) -> None:
        """Records that nothing is in flight, or that nothing is to be drawn."""
        self.tokens = None

    def stalled(self, tokens: float, limit_s: float) -> bool:
        """Records the number of tokens; returns whether it has not changed for `limit_s`."""
        now = time.monotonic()
        self.looks += 1
        if tokens != self.tokens:
            self.moved |= self.tokens is not None
            self.tokens, self.since, self.looks = tokens, now, 0
        return self.moved and now - self.since > limit_s and self.looks >= _LOOKS


@dataclass(eq=False, kw_only=True)
class Server:
    """A server and its state.

    Attributes:
      http: its connection.
      revive: restarts it where it ended, if it is a child of this process.
      ready: whether it answers and its last update succeeded.
      shut: whether it gets no new requests, because it is in an update.
      load: number of sequences in flight.
      served: whether it has taken requests before.
      strikes: number of requests in a row that took too long.
      cause: why it is not ready, or the stage of its update.
      told: the cause that was last logged while the server gets no requests.
      suspect: a version whose tokens are discarded, or None.
      flights: requests in flight; each ends with the confirmation that its tokens are of the weights of their label.
      held: those of them that reached it when it was already paused, and were cut off to be asked again.
      lock: lock of its updates.
      marks: checks of the weights that it holds.
      progress: its progress in drawing tokens.
      committed: the versions that it has held, in order.
      epoch: number that changes when requests in flight no longer count.
    """

    http: ServerHttp
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
    progress: Progress = field(default_factory=Progress)
    committed: list[int] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.marks = Marks(http=self.http)

    def disown(self) -> None:
        """Ends the requests in flight, none of whose tokens count."""
        self.epoch += 1
        for flight in list(self.flights):
            flight.cancel()


async def stage(server: Server, published: Published) -> dict[str, float]:
    """Has every rank read a version, while the server generates.

    Returns:
      The bytes that all ranks read, and those of tensors that they had from the version before; nothing where no rank reads.

    Raises:
      ServerFault, Refused: a rank cannot; the server keeps its weights.
    """
    if published.adapter:
        server.cause = "loading adapters"
        await server.http.load_adapters(published.adapter, published.path)
    elif not published.memory:
        server.cause = "staging"
        await server.http.stage(published.path, published.version)
        return await _staged(server.http, published.version)
    return {}


async def swap(server: Server, published: Published, inflight: Inflight, limit_s: float) -> dict[str, float]:
    """Swaps in the version that a server has staged; the server stays shut to new requests until the caller opens it.

    Args:
      inflight: treatment of requests in flight.
      limit_s: most seconds until requests in flight have ended, where they have to.

    Returns:
      Seconds between pause and resume, and from the pause's end to resume; numbers of tensors whose checksums the server compared and
      could not compare; and the canary's gap.

    Raises:
      ServerFault, Refused: a step failed; the server stays as that step left it.
    """
    if published.adapter:
        return await _exchanged(server, published)
    http, begin = server.http, time.perf_counter()
    server.cause, server.shut = "pausing", True
    mode, clear = PAUSES[inflight]
    await http.pause(mode, clear_cache=clear, limit_s=limit_s)
    await _quiet(server, drained=mode != "keep", streams=streamed(server, inflight))
    server.cause = "committing"
    paused = time.perf_counter()
    checked = await _commit(server, published)
    await http.label(published.version)
    server.committed.append(published.version)
    http.version = published.version
    await http.resume()
    resumed = time.perf_counter()
    server.cause = "canary"
    seconds = {"paused_s": resumed - begin, "commit_s": resumed - paused}
    return seconds | checked | await _canary(server, published)


async def _exchanged(server: Server, published: Published) -> dict[str, float]:
    """Has later requests ask for the adapters that a server has loaded; those in flight keep their own to the end."""
    http, begin = server.http, time.perf_counter()
    server.cause = "canary"
    found = await _gap(server, published)
    server.committed.append(published.version)
    http.version, http.adapter = published.version, published.adapter
    await http.unload_idle()
    return {"paused_s": 0.0, "commit_s": time.perf_counter() - begin} | found


def streamed(server: Server, inflight: Inflight) -> bool:
    """Returns whether a server's tokens are streamed, because nothing else gives their versions."""
    return inflight in ("recompute", "stale_kv") and not (server.http.spans or server.http.adapters)


async def _commit(server: Server, published: Published) -> dict[str, float]:
    """Loads the version on every rank, which compares its model's weights with the published checksums.

    Returns:
      The number of tensors that were compared, of the rank with the fewest, and of those that were not, of the rank with the most.

    Raises:
      ServerFault: a rank holds another version, or other weights; the message holds the ranks' reasons.
      Refused: the server's plugin is of another version of this package, or it quantizes otherwise than expected.
    """
    http, version, memory, mark = server.http, published.version, published.memory, server.marks.new()
    held = await (http.commit_memory(version, mark, memory) if memory else http.commit(version, mark))
    reasons = sorted({str(rank["error"]) for rank in held if rank.get("error")})
    if not held or reasons or any(int(rank.get("version", -1)) != version for rank in held):
        versions = [rank.get("version") for rank in held]
        raise ServerFault(
            f"{http.url} holds version {versions} after the commit of {version} ({'; '.join(reasons) or 'no reason given'}): it stays paused"
        )
    if any("checked" not in rank or "was" not in rank for rank in held):
        raise Refused(
            f"{http.url} does not say what its model holds, as its plugin is older than this learner: "
            "install the learner's version of jaxrl-llm beside vLLM"
        )
    check_quantization(http.url, held, published.quantization)
    if server.marks.held and any(rank["was"] != server.marks.held for rank in held):
        _log.warning(
            "%s server %s held other weights than were committed before: what was in flight there is asked again",
            http.kind,
            http.url,
        )
        server.disown()
    server.marks.settle()
    found = {
        "tensors_checked": float(min(int(rank["checked"]) for rank in held)),
        "tensors_unchecked": float(max(int(rank["unchecked"]) for rank in held)),
    }
    if published.quantization:
        found["tensors_quantized"] = float(min(int(rank["quantized"]) for rank in held))
        found["rounding"] = max(float(rank["rounding"]) for rank in held)
    return found


async def _staged(http: ServerHttp, version: int) -> dict[str, float]:
    """Returns what `stage` does when every rank has staged the version; raises ServerFault where one failed."""
    wait_s = _POLL_S
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
            counts = {"staged_bytes": "bytes", "unchanged_bytes": "unchanged"}
            return {said: float(sum(rank.get(name, 0) for rank in ranks)) for said, name in counts.items()}
        await asyncio.sleep(wait_s)
        wait_s = min(1.5 * wait_s, _LONGEST_POLL_S)


async def _quiet(server: Server, *, drained: bool, streams: bool) -> None:
    """Returns when no tokens of the old weights are on their way: there is no request in flight, or no token has arrived for a while.

    A request that reached the server after its pause would wait for the resume, which waits for it, so it is cut off.
    """
    until = time.monotonic() + _HELD_S
    while drained and server.flights:
        left = until - time.monotonic()
        if left <= 0:
            server.held |= {flight for flight in server.flights - server.held if flight.cancel()}
        await asyncio.wait(
            set(server.flights), timeout=left if left > 0 else _POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.sleep(0)  # the caller takes the answer
    seen = -1
    while streams and seen != (now := server.http.arrivals):
        seen = now
        await asyncio.sleep(_SILENCE_S)


async def _canary(server: Server, published: Published) -> dict[str, float]:
    """Compares server and learner as `_gap` does; where they differ, the server is paused and its tokens are suspect."""
    try:
        return await _gap(server, published)
    except Apart:
        server.suspect = published.version
        await server.http.pause("abort", clear_cache=True)
        raise


async def _gap(server: Server, published: Published) -> dict[str, float]:
    """Compares the server's log-probs of the fixed text with the learner's.

    Raises:
      Apart: they differ by more than rounding explains.
    """
    canary = published.canary
    if canary is None:
        return {}
    scored = await server.http.score(canary.tokens, canary.likely, LISTED, published.adapter)
    found = gap(canary, *scored)
    if found.ratio <= canary.limit:  # false for NaN
        return {
            "canary_ratio": found.ratio, "canary_limit": canary.limit, "canary_likely": found.likely,
            "canary_mean": found.mean, "canary_max": found.max,
        }  # fmt: skip
    raise Apart(
        f"{server.http.url} scores the canary apart from the learner under version {published.version}: the probabilities of the "
        f"learner's most likely tokens differ by {found.ratio:.3g} of themselves, rounding explains {canary.limit:.3g} "
        f"({found.mean:.3g} nats a token of the text): does it serve the same model, in the same dtype, with the same config.json?"
    )
