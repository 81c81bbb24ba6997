"""The running sampler over a fleet of servers: completions of token prefixes, which are finished although servers fail.

A sequence is a draft that holds the tokens so far. A request draws the missing ones; where it is cut short (a server failed, or aborted
for an update), the next one, to any server, includes the tokens so far in its prefix.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.experience import Completion, SamplingParams, seed_of
from jaxrl_llm.protocols import Conversation, Params, SamplerDown
from jaxrl_llm.samplers.requests import Draft, Request, check
from jaxrl_llm.samplers.servers.answers import Ask, Piece, Refused, ServerFault
from jaxrl_llm.samplers.servers.autoscale import Autoscale, Scaler, load_of
from jaxrl_llm.samplers.servers.fleet import Fleet
from jaxrl_llm.samplers.servers.publisher import Publisher, still_there
from jaxrl_llm.samplers.servers.server_update import Published

_log = logging.getLogger(__name__)

Group = tuple[int, list[Completion]]
# Counters of a fleet: requests that were retried, cut short, held by a pause or late; servers that stalled, and checks of those that do
# not count their tokens; servers and updates; versions that no server took and that were published again; and changes of the number of
# servers, requested and failed.
COUNTED = (
    "retries", "aborted", "held", "slow", "stalled", "uncounted", "set_aside", "rejoined", "joined", "left", "updates", "late_updates", "lagging",
    "published_again", "scaled", "scale_failed",
)  # fmt: skip
_MOST_EMPTY = 20  # most requests in a row that may end without a token


@dataclass(eq=False, kw_only=True)
class FleetClient:
    """A running sampler; see vllm.VllmSampler and sglang.SglangSampler for its settings.

    Attributes:
      publisher: writes versions of the weights.
      connect: opens the fleet; called once, at the first publication.
      disconnect: stops what `connect` started beside the fleet.
      tokenizer: decodes token ids to the text that is searched for stop strings; None where there are none.
      max_length: most tokens of a prefix and its completion together.
      seeded: whether requests carry seeds.
      remove: whether `close` removes the published versions.
      record: whether completions record the experts of each token.
      adapted: whether it gets adapters beside their base instead of their sum.
      other: makes a publisher of the other transfer; it raises OSError where that is not available here. None where there is no other transfer.
      autoscale: the rule of the number of servers, and the command that changes it.
      version: the policy version that answers the next request; -1 before the first publication.
      counters: tokens and clipped requests since the last call of `metrics`.
    """

    publisher: Publisher
    connect: Callable[[], Awaitable[Fleet]]
    disconnect: Callable[[], Awaitable[None]]
    tokenizer: Any
    max_length: int
    seeded: bool = True
    remove: bool = False
    record: bool = False
    adapted: bool = False
    other: Callable[[], Publisher] | None = None
    autoscale: Autoscale = field(default_factory=Autoscale)
    version: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._fleet: Fleet | None = None
        self._publication: asyncio.Task[None] | None = None
        self._scaler: Scaler | None = None
        self._begun = asyncio.Event()
        self._closed = self._told = self._served_once = False
        self._generated = self._clipped = self._open = 0
        self._busy_s, self._since = 0.0, 0.0

    # Sampling goes on while the learner updates, since nothing here runs on the learner's devices.
    overlaps = True
    converses = True

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int],
        conversation: Conversation | None = None,
    ) -> AsyncIterator[Group]:  # fmt: skip
        """Yields (index of the prefix, its n completions) as groups finish.

        Log-probs are those of the distribution that the token was drawn from; greedy tokens report the untempered softmax.
        Equal seeds give equal draws where the server's arithmetic is deterministic and no request was cut short.

        Args:
          prefixes: int [T] token ids each, 1 to max_length - 1 of them.
          n: completions of each prefix.
          settings: how tokens are drawn.
          seeds: one for each prefix, 0 <= seed < 2^64.
          conversation: the conversation of which the prefixes are turns; they go to the server of the turn before while its load allows it.

        Raises:
          ValueError: where an argument is not as described, or a server refuses a request.
          RuntimeError: before the first `publish`, and after `close`.
          SamplerDown: no server could answer; the message names each and its cause. Before any server has served a version, OSError.
        """
        if self._publication is None or self._closed:
            raise RuntimeError(
                "the sampler is closed" if self._closed else "the sampler has no weights yet: publish() first"
            )
        prefixes = [np.asarray(prefix) for prefix in prefixes]
        vocabulary = self.publisher.policy.architecture.vocabulary_size
        request = Request(
            prefixes=prefixes, n=n, settings=settings, seeds=seeds, max_length=self.max_length, version=self.version,
            conversation=conversation,
        )  # fmt: skip
        check(request, vocabulary, self.tokenizer)
        return self._stream(request)

    async def publish(self, params: Params, version: int) -> None:
        """Publishes `params` as `version`; returns when the learner may change them, and later requests wait for the servers.

        Raises:
          SamplerDown: this version could not be written, or no server took the one before it, by either transfer. Before any server has
            served a version: OSError, or ValueError where a server is not set up for updates.
        """
        if self._publication is not None:
            await self._publication
        if self.publisher.driver is not None and self._fleet is not None:
            # A server that holds the version before the last, or a later one, copies nothing that is now overwritten.
            await self._fleet.settled(version - 2)
        try:
            published = self._write(params, version)
        except OSError as error:
            down = self._down(error)
            if down is error:
                raise
            raise down from error
        self.version = version
        self._begun.clear()
        self._publication = asyncio.create_task(self._delivery(published, params))

    def _write(self, params: Params, version: int) -> Published:
        """Begins to write a version, by the current transfer."""
        _, manifest = self.publisher.start(params, version)
        place, memory = self.publisher.place(version), self.publisher.described()
        return Published(
            path=place, version=version, canary=manifest.canary, memory=memory, adapter=self.publisher.adapter(version),
            quantization=self.publisher.quantization,
        )  # fmt: skip

    async def _finished(self, published: Published) -> Published:
        """Returns a version once it is completely written, with what relays need to know of it."""
        await self.publisher.finish(published.version)
        return replace(published, source=self.publisher.source(published.version), blocks=self.publisher.blocks())

    def _down(self, error: Exception) -> Exception:
        """Returns the exception with which the run learns that all servers, or publishing, failed."""
        if not self._served_once or isinstance(error, SamplerDown):
            return error
        return SamplerDown(
            f"rollouts cannot go on with version {self.version} of the weights; what was learned is not lost: {error}"
        )

    async def _delivery(self, published: Published, params: Params) -> None:
        """Updates the servers to a version: by what was written, then written anew, then by the other transfer."""
        try:
            try:
                await self._deliver(published)
            except (ServerFault, Refused) as refusal:
                if self._fleet is None or not self._served_once:
                    raise
                await self._deliver_again(published, params, refusal)
            self._served_once = True
            await self.publisher.prune(self._fleet.reading() if self._fleet is not None else ())
        except (OSError, Refused) as error:
            down = self._down(error)
            if self._fleet is not None:
                self._fleet.balancer.fail(down)
            if down is error:
                raise
            raise down from error

    async def _deliver_again(self, published: Published, params: Params, refusal: Exception) -> None:
        """Tries the remaining ways where every server refused a version; raises the last refusal."""
        assert self._fleet is not None
        version, first = published.version, self.publisher
        for way, make in (("whole once more", lambda: first), ("by the other transfer", self.other)):
            if make is None:
                break
            _log.warning("version %d is published %s, because every server refused it: %s", version, way, refusal)
            try:
                self.publisher = make()
                if still_there(params):
                    published = await self._finished(self._write(params, version))
                elif self.publisher is not first:
                    break
                await self._fleet.publish_again(published)
                return
            except (OSError, Refused) as error:
                refusal = error
        if self.publisher is not first:
            self.publisher.close(remove=False)
            self.publisher = first
        raise refusal

    async def _deliver(self, published: Published) -> None:
        try:
            if self._fleet is None:
                self._fleet = await self.connect()
            published = await self._finished(published)
            update = asyncio.ensure_future(self._fleet.publish(published))
            try:
                await asyncio.sleep(0)  # the update has told the fleet which version requests ask for
            except asyncio.CancelledError:  # at `close`, which would leave it behind
                update.cancel()
                await asyncio.gather(update, return_exceptions=True)
                raise
        finally:
            self._begun.set()
        await update

    async def close(self) -> None:
        """Ends what is running and stops the servers that it started; a failure of one part does not keep the others from ending."""
        self._closed = True
        if self._publication is not None:
            self._publication.cancel()
            await asyncio.gather(self._publication, return_exceptions=True)
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self.publisher.close, remove=self.remove)
            closing.push_async_callback(self.disconnect)
            if self._fleet is not None:
                closing.push_async_callback(self._fleet.close)
            if self._scaler is not None:
                closing.push_async_callback(self._scaler.close)

    def steer(self, step: Mapping[str, float]) -> None:
        """Requests more servers or fewer by a step's times, where `autoscale` has a command."""
        if not self.autoscale or self._fleet is None or (load := load_of(step)) is None:
            return
        self._scaler = self._scaler or Scaler(rule=self.autoscale, counters=self._fleet.counters)
        self._scaler.step(sum(server.ready for server in self._fleet.servers), load, time.monotonic())

    def metrics(self) -> Mapping[str, float]:
        """Returns counters and times since the last call, and those of the last publication."""
        if self._open:
            self._clock(0)
        values = {
            "sampler/generated_tokens": float(self._generated),
            "sampler/tokens_per_s": self._generated / self._busy_s if self._busy_s else 0.0,
            "sampler/seconds": self._busy_s,
            "sampler/clipped": float(self._clipped),
        }
        values |= {f"publish/{name}": seconds for name, seconds in self.publisher.seconds.items()}
        if self._fleet is not None:
            values |= {f"publish/{name}": value for name, value in self._fleet.update.items()}
            values |= {f"sampler/{name}": float(self._fleet.counters[name]) for name in COUNTED}
            values |= self._fleet.relays.metrics() if self._fleet.relays is not None else {}
            if self.record:
                values["sampler/unrecorded"] = float(sum(s.http.take_unrecorded() for s in self._fleet.servers))
            values["sampler/servers"] = float(len(self._fleet.balancer.serving()))
            self._fleet.counters.clear()
        self._generated, self._clipped, self._busy_s = 0, 0, 0.0
        return values

    # -- one call of sample --------------------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> AsyncIterator[Group]:
        self._clock(1)
        tasks = [asyncio.create_task(self._group(request, index)) for index in range(len(request.prefixes))]
        try:
            for _ in tasks:
                group = await request.groups.get()
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            self._clock(-1)
            request.open = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _clock(self, change: int) -> None:
        """Adds up the seconds in which anything is being sampled."""
        now = time.perf_counter()
        if self._open:
            self._busy_s += now - self._since
        self._since = now
        self._open += change

    async def _group(self, request: Request, index: int) -> None:
        """Draws all completions of one prefix, or delivers the error."""
        try:
            drafts = request.drafts(index)
            alone = request.settings.temperature == 0  # vLLM draws one greedy completion a request
            await self._draw_all([[draft] for draft in drafts] if alone else [drafts])
        except OSError as error:
            down = self._down(error)
            down.__cause__ = None if down is error else error
            request.groups.put_nowait(down)
        except Exception as error:
            request.groups.put_nowait(error)

    async def _draw(self, drafts: list[Draft], empty: int = 0) -> None:
        """Finishes drafts of one prefix: several that have no tokens yet, or one."""
        fleet = await self._served()
        first = drafts[0]
        ask = self._ask(drafts)
        home = hashlib.blake2b(first.prefix.tobytes(), digest_size=8).digest()
        talk = first.request.conversation
        pieces = await fleet.ask(ask, home, first.request.version, talk.id.encode() if talk else b"")
        pairs = list(zip(drafts, pieces, strict=True))
        left = [draft for draft, piece in pairs if not self._take(draft, piece, int(ask.sampling["max_tokens"]))]
        empty = 0 if any(piece.tokens for piece in pieces) else empty + 1
        if empty > _MOST_EMPTY:
            raise ServerFault(
                f"{empty} requests in a row for one prefix ended without a token: look at the servers' logs"
            )
        fresh = [draft for draft in left if not draft.count]
        parts = [[draft] for draft in left if draft.count] + ([fresh] if fresh else [])
        await self._draw_all(parts, empty)

    async def _draw_all(self, parts: Sequence[list[Draft]], empty: int = 0) -> None:
        """Calls `_draw` for all parts concurrently; where one fails, the others end."""
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._draw(part, empty))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _served(self) -> Fleet:
        """Returns the fleet, once it knows the version that requests ask for."""
        await self._begun.wait()
        if self._closed:
            raise RuntimeError("the sampler is closed")
        if self._publication is not None and self._publication.done():
            self._publication.result()
        if self._fleet is None:
            raise RuntimeError("no server was reached")
        return self._fleet

    def _ask(self, drafts: Sequence[Draft]) -> Ask:
        """Returns the request for the missing tokens of drafts with equally many tokens.

        The tokens before `min_tokens` are requested alone: no stop counts there, and vLLM's own `min_tokens` would remove the stop ids
        from the distribution.
        """
        draft = drafts[0]
        settings, limit = draft.request.settings, draft.request.limit(draft.index)
        early = draft.count < settings.min_tokens - 1
        sampling: dict[str, Any] = {
            "n": len(drafts), "temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p,
            "min_p": settings.min_p, "repetition_penalty": settings.repetition_penalty, "logprobs": 0, "ignore_eos": True,
            "max_tokens": (min(settings.min_tokens - 1, limit) if early else limit) - draft.count,
            "detokenize": bool(settings.stop_strings), "skip_special_tokens": False,
            "stop_token_ids": [] if early else list(settings.stop_token_ids),
        }  # fmt: skip
        if settings.stop_strings and not early:
            sampling["stop"] = list(settings.stop_strings)
        if self.seeded and settings.temperature > 0:
            # vLLM draws sample i of a request by its seed + i, so that a request for some of the samples again needs another seed.
            again = draft.count or len(drafts) < draft.request.n
            numbers = (draft.count, *(one.sample for one in drafts)) if again else ()
            sampling["seed"] = seed_of(draft.request.seeds[draft.index], *numbers)
        tokens = [*draft.prefix.tolist(), *draft.tokens.tolist()]
        return Ask(tokens=tokens, sampling=sampling, routed=draft.routed)

    def _take(self, draft: Draft, piece: Piece, asked: int) -> bool:
        """Adds drawn tokens to a draft; returns whether the draft is finished."""
        count = len(piece.tokens)
        self._generated += count
        if piece.routes is not None:
            draft.record(piece.routes)
        stopped = draft.extend(
            np.asarray(piece.tokens, np.int32), np.asarray(piece.logprobs, np.float32),
            np.asarray(piece.versions, np.int32), self._text,
        )  # fmt: skip
        clipped = piece.finish == "length" and count < asked  # the server's context is shorter than ours
        self._clipped += clipped
        if clipped and not self._told:
            self._told = True
            _log.warning(
                "a server cut a response at %d of %d tokens, because its context is shorter than the run's %d tokens: start it "
                "with a larger --max-model-len, or --context-length for SGLang (sampler/clipped counts such responses)",
                count, asked, self.max_length,
            )  # fmt: skip
        if stopped or piece.finish == "stop":
            draft.request.finish(draft, "stop")
        elif clipped or draft.count >= draft.request.limit(draft.index):
            draft.request.finish(draft, "stop" if draft.ended_by_id() else "length")
        else:
            return False
        return True

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)
