"""The running embedded sampler: prompts are prefilled and responses decoded in JAX, on the learner's mesh or on devices of its own.

One task serves all calls of `sample`, a chunk of decode steps at a time. Its programs are started from the event loop's thread, in one
order on every device; only the wait for a chunk runs in a thread, and rewards of finished groups run meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.mesh import loops_turn
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Conversation, Params
from jaxrl_llm.samplers.embedded.decode import Chunk, Prefix, bytes_of, finished
from jaxrl_llm.samplers.embedded.own_devices import unpadded
from jaxrl_llm.samplers.embedded.room import Capacity, Counters, announce, fitting, free_bytes
from jaxrl_llm.samplers.embedded.shelf import Shelf
from jaxrl_llm.samplers.embedded.slots import SlotBatch
from jaxrl_llm.samplers.embedded.smaller import Smaller
from jaxrl_llm.samplers.embedded.weights import Weights, deleted
from jaxrl_llm.samplers.requests import Request, check

PromptCompletions = tuple[int, list[Completion]]


@dataclass(eq=False, kw_only=True)
class Engine:
    """A running embedded sampler; see EmbeddedSampler for the fields.

    A conversation's keys and values stay in its slot for its next turn, until the slot is needed, it ends or other weights are published.

    A call joins the running batch if the batch's shapes hold it; else it waits until the batch is empty and a larger one takes its
    place. A call whose caller has gone frees its slots at the next chunk. A batch has only as many slots as fit in a device's memory.

    Attributes:
      policy: the model.
      serve: converts the learner's parameters to those that decoding reads.
      tokenizer: decodes token ids to the text that is searched for stop strings; None where there are none.
      max_length: most tokens of a prefix and its completion together.
      slots: most sequences decoded at a time.
      decode_chunk: decode steps of a chunk, after which the host reads the tokens.
      prefill_tokens: most tokens of a block of prompts, padding included.
      cache: dtype of cached keys and values; None is the policy's.
      record: whether completions record the experts of each token.
      keep: whether the slots of conversations are kept between their turns.
      shrink: factor by which a batch shrinks where its last sequences need no more slots and nothing waits; 0 for never.
      page: entries of a page of the cache; 0 where each slot has its own room for the longest sequence.
      adapted: whether it gets adapters beside their base instead of their sum.
      shelf: the further sets of adapters that may be loaded beside the published one.
      overlaps: whether its devices are its own, so that it samples while the learner computes.
      version: the policy version it serves; -1 before the first publication.
    """

    policy: Policy
    serve: Callable[[Params], dict[str, Any]]
    tokenizer: Any
    max_length: int
    slots: int
    decode_chunk: int
    prefill_tokens: int
    cache: str | None = None
    record: bool = False
    keep: bool = True
    shrink: int = 0
    page: int = 0
    adapted: bool = False
    shelf: Shelf = field(default_factory=Shelf)
    overlaps: bool = False
    version: int = field(default=-1, init=False)

    everywhere = True  # all processes of a run call it alike, and decode together
    converses = True
    loaded = property(lambda self: self.shelf.names, doc="The names of the loaded sets of adapters, in order.")

    def __post_init__(self) -> None:
        self._weights = Weights(policy=self.policy, serve=self.serve, shelf=self.shelf)
        self._smaller = Smaller(self.policy, self.shrink, self.cache, self.record) if self.shrink else None
        self._waiting: deque[Prefix] = deque()
        self._requests: set[Request] = set()
        self._task: asyncio.Task | None = None
        self._batch: SlotBatch | None = None
        self._queued: tuple[Chunk, int] | None = None  # a chunk that follows the running one, and its version
        self._stirred = asyncio.Event()  # wakes the task that waits for the next turn of a conversation
        self._programs: set[tuple] = set()
        self._counters = Counters()
        self._closed = False
        self._free: int | None = None  # free bytes of a device without a cache; None where they are unknown
        self._announced: set[Capacity] = set()
        self._fitted: dict[Capacity, Capacity] = {}

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far, one for each bucket of shapes."""
        return len(self._programs)

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int],
        conversation: Conversation | None = None,
    ) -> AsyncIterator[PromptCompletions]:  # fmt: skip
        """Yields (index of the prefix, its n completions) as groups finish.

        Draw t of sample i of prefix j depends on (seeds[j], i, t) and the logits alone. Log-probs are float32, of the
        distribution that the token was drawn from; greedy tokens report the untempered softmax.

        Args:
          prefixes: int [T] token ids each, 1 to max_length - 1 of them.
          n: completions of each prefix.
          settings: how tokens are drawn; other values compile nothing new.
          seeds: one for each prefix, 0 <= seed < 2^64.
          conversation: the conversation of which the prefixes are turns; the batch has room for its longest turn, and slots for all
            conversations.

        Raises:
          ValueError: where an argument is not as described, or no adapters are loaded as `settings.adapter`; nothing is sampled then.
          RuntimeError: before the first `publish`, and after `close`.
        """
        if self._weights.params is None or self._closed:
            raise RuntimeError(
                "the sampler is closed" if self._closed else "the sampler has no weights yet: publish() first"
            )
        prefixes = [np.asarray(prefix) for prefix in prefixes]
        request = Request(
            prefixes=prefixes, n=n, settings=settings, seeds=seeds, max_length=self.max_length, conversation=conversation,
            place=self.shelf.place(settings.adapter),
        )  # fmt: skip
        check(request, self.policy.architecture.vocabulary_size, self.tokenizer)
        return self._stream(request)

    async def publish(self, params: Params, version: int) -> None:
        """Serves `params` as `version`, from the next chunk that starts; sequences in flight keep their cache.

        The sampler's own arrays of the version before are deleted first, so that a device never holds two served copies; a running chunk
        keeps what it reads until it ends.

        Raises:
          ValueError: where `params` are not those of the policy; the version before stays served.
        """
        self._weights.publish(unpadded(self.policy, params) if self.overlaps else params)
        self._parted()
        self.version = version

    def load(self, name: str, adapters: Params) -> None:
        """Serves `adapters`, a tree like `AdaptedPolicy.sizes()`, to requests whose `SamplingParams.adapter` is `name`.

        They are copied, and stay until they are unloaded, beside each published version, whose number completions have.

        Raises:
          ValueError: there is no room, the name is taken, or the adapters are not like the policy's or not finite.
        """
        self._weights.load(name, adapters)

    def unload(self, name: str) -> None:
        """Frees the place of loaded adapters, and the slots kept for conversations with them.

        Raises:
          ValueError: no adapters have the name, or requests for them are in flight.
        """
        place = self.shelf.place(name)
        if flights := sum(request.settings.adapter == name for request in self._requests):
            raise ValueError(
                f"{flights} requests for the adapters {name!r} are in flight: unload() them when those are over"
            )
        self.shelf.remove(name)
        self._parted(place=place)

    def forget(self, conversation: str) -> None:
        """Frees the slots kept for a conversation that has ended; with the last one the cache is freed."""
        self._parted(conversation)

    def retire(self) -> None:
        """Frees the served weights, unless on devices of its own, before the next are made; nothing is sampled until those are published."""
        if not self.overlaps:
            self._weights.free()
            self._parted()

    async def close(self) -> None:
        """Ends all requests, whose callers get a RuntimeError, and frees the weights."""
        self._closed, self._weights.params, self._weights.apart = True, None, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> Mapping[str, float]:
        """Returns counters and times since the last call; occupancy is the share of slot-steps that gave a kept token."""
        self._count_evicted()
        done, self._counters = self._counters, Counters()
        return {**done.metrics(), "sampler/compilations": float(self.compilations)}

    async def _stream(self, request: Request) -> AsyncIterator[PromptCompletions]:
        request.place = self.shelf.place(request.settings.adapter)  # others may have it since `sample`
        self._requests.add(request)
        self._waiting.extend((request, index) for index in range(len(request.prefixes)))
        self._stirred.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            for _ in request.prefixes:
                group = await request.groups.get()
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            request.open = False
            self._requests.discard(request)

    async def _run(self) -> None:
        """Serves all requests, then ends and frees the cache, which conversations that may have further turns keep until they end."""
        self._stirred = asyncio.Event()  # of this event loop
        try:
            await self._look_at_memory()
            while True:
                while self._waiting and not self._waiting[0][0].open:
                    self._waiting.popleft()
                if self._batch is not None and (self._batch.busy or self._fits(self._batch)):
                    await self._advance(self._batch)
                elif self._waiting:
                    self._begin()
                elif self._batch is not None and self._batch.parking:
                    self._stirred.clear()
                    await self._stirred.wait()
                else:
                    return
        except asyncio.CancelledError:
            self._fail(RuntimeError("the sampler was closed, or its event loop ended, while it was sampling"))
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._drop()
            self._task = None

    def _begin(self) -> None:
        """Makes a batch of slots for the waiting requests."""
        self._drop()  # the old cache is freed before the next one is made
        wanted = self._capacity({request for request, _ in self._waiting})
        given = self._fitting(wanted)
        if given != wanted and wanted not in self._announced:
            self._announced.add(wanted)
            announce(self.policy, wanted, given, self._free or 0, self.cache)
        self._batch = SlotBatch(self.policy, given, self._programs, self.cache, self.record, self.keep)

    def _drop(self) -> None:
        """Frees the cache."""
        if self._batch is not None:
            if self._batch.parking:
                self._batch.parking.clear()
            self._count_evicted()
            self._batch = self._queued = None

    def _parted(self, conversation: str | None = None, place: int | None = None) -> None:
        """Frees the parked slots of a conversation, of the adapters in a place, or of all, and the cache where it is no longer used."""
        batch = self._batch
        if batch is not None and batch.parking:
            batch.parking.clear(place) if conversation is None else batch.parking.forget(conversation)
            if not (batch.busy or batch.parking or self._waiting):
                self._drop()
        self._stirred.set()

    def _count_evicted(self) -> None:
        if self._batch is not None and self._batch.parking is not None:
            self._counters.evicted += self._batch.parking.evicted
            self._batch.parking.evicted = 0

    async def _advance(self, batch: SlotBatch) -> None:
        """Refills the slots, runs one chunk and delivers finished sequences."""
        begin = time.perf_counter()
        async with loops_turn(not self.overlaps):
            running = self._started(batch)
        await finished(running[0])
        kept, steps = batch.collect(*running, self._text)
        self._counters.generated += kept
        self._counters.slot_steps += steps * batch.capacity.slots
        self._counters.seconds += time.perf_counter() - begin

    def _started(self, batch: SlotBatch) -> tuple[Chunk, int]:
        """Returns the running chunk and its version; where the next one is known already, it is queued behind it."""
        params, version = self._weights.live, self.version
        running, self._queued = self._queued, None
        if running is None:
            running = self._refilled(batch, params, version), version
        if self._settled(batch):
            self._queued = batch.step(self._weights.served, self.decode_chunk, running[0]), version
        return running

    def _refilled(self, batch: SlotBatch, params: Params, version: int) -> Chunk:
        """Refills the slots and starts a chunk of decode steps."""
        self._grown(batch)
        self._resume(batch, params, version)
        while not batch.place(params, version) and batch.room:
            if batch.preempted:
                self._counters.again += batch.prefill_again(params, version, self.prefill_tokens)
            elif block := self._next_block(batch):
                self._counters.prefilled += batch.prefill(block, params, version)
                self._counters.again += sum(request.conversation.known for request, _ in block if request.conversation)
            else:
                break
        if self._smaller is not None:
            if (fewer := self._fewer(batch)) < batch.capacity.slots:
                self._smaller.wait(batch)
                batch.resize(fewer)
            self._smaller.begin(batch, self._weights.served, self.decode_chunk)
        batch.secure(self.decode_chunk)
        return batch.step(self._weights.served, self.decode_chunk)

    def _settled(self, batch: SlotBatch) -> bool:
        """Returns whether the batch stays unchanged after the running chunk, so that the next one need not wait for the host."""
        if jax.process_count() > 1 or self._waiting or batch.read or not batch.left(self.decode_chunk):
            return False
        # Entries of both chunks, since the host has not seen the running one's.
        return self._fewer(batch, self.decode_chunk) == batch.capacity.slots and batch.reserve(2 * self.decode_chunk)

    def _fewer(self, batch: SlotBatch, steps: int = 0) -> int:
        """Returns the number of slots to which the last sequences, those with more than `steps` tokens to draw, move."""
        if self._smaller is None or self._waiting:
            return batch.capacity.slots
        return self._smaller.slots(batch, steps, self._free)

    def _grown(self, batch: SlotBatch) -> None:
        """Restores the slots of a batch that has shrunk where requests wait."""
        if batch.capacity != batch.whole and self._waiting:
            batch.resize(batch.whole.slots)

    def _resume(self, batch: SlotBatch, params: Params, version: int) -> None:
        """Continues the waiting turns whose conversations are parked, some at a time, since their slots' entries are copied as a block's are."""
        found: dict[int, Request] = {}
        for request, _ in self._waiting if batch.parking else ():
            slot = batch.parked(request, version) if request.open else None
            if slot is not None and slot not in found and self._holds(batch, request):
                found[slot] = request
        going = set(found.values())
        self._waiting = deque(prefix for prefix in self._waiting if prefix[0] not in going) if going else self._waiting
        most = max(1, self.prefill_tokens // batch.capacity.length, batch.capacity.slots // 16)
        kept, prefilled = batch.resume(found, params, most) if found else (0, 0)
        self._counters.kept += kept
        self._counters.prefilled += prefilled

    def _next_block(self, batch: SlotBatch) -> list[Prefix]:
        """Returns the next waiting prefixes, up to `prefill_tokens` and up to the first that does not fit in the batch."""
        block: list[Prefix] = []
        longest, rows = 0, set[bytes]()
        while self._waiting:
            request, index = self._waiting[0]
            longest = max(longest, len(request.prefixes[index]))
            rows.add(bytes_of(self._waiting[0]))
            full = bool(block) and prod(batch.block_shape(len(rows), longest)) > self.prefill_tokens
            if full or not self._fits(batch):
                break
            self._waiting.popleft()
            if request.open:
                block.append((request, index))
        return block

    def _capacity(self, requests: set[Request]) -> Capacity:
        shards = self.policy.partitioner.batch_shards
        return Capacity.of(list(requests), max_slots=self.slots, shards=shards, page=self.page)

    async def _look_at_memory(self) -> None:
        """Measures the free memory, while there is no cache and the making of the weights has freed its memory."""
        params = self._weights.params
        if params is not None and not deleted(params):
            try:
                await finished(params)
            except RuntimeError:
                if not deleted(params):  # a publication came meanwhile
                    raise
        self._fitted.clear()
        self._free = free_bytes(self.policy.partitioner.mesh.local_devices)

    def _fitting(self, wanted: Capacity) -> Capacity:
        """Returns the capacity with as many slots as fit on a device."""
        if wanted not in self._fitted:
            self._fitted[wanted] = fitting(self.policy, wanted, self._free, self.cache)
        return self._fitted[wanted]

    def _fits(self, batch: SlotBatch) -> bool:
        """Returns whether the request at the head of the queue fits in the batch."""
        return bool(self._waiting) and self._holds(batch, self._waiting[0][0])

    def _holds(self, batch: SlotBatch, request: Request) -> bool:
        """Returns whether a request fits in the batch, with the slots that a device has room for at its length."""
        held, wanted = batch.whole, self._capacity({request})
        if wanted.length <= held.length and wanted.penalised <= held.penalised:
            wanted = self._fitting(wanted.stretched(held))
        return held.holds(wanted)

    def _fail(self, error: Exception) -> None:
        self._waiting.clear()
        for request in self._requests:
            request.groups.put_nowait(error)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)
