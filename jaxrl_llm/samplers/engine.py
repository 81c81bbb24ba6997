"""The embedded sampler's engine: one task serves all calls of `sample`, a chunk of decode steps at a time.

Programs are started from the event loop's thread, so that all programs of a process start in one order on every device;
only the wait for a chunk runs in a thread, and rewards of finished groups run meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import numpy as np

from jaxrl_llm.experience import Completion, SamplingSettings
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Params
from jaxrl_llm.samplers import room
from jaxrl_llm.samplers.requests import Request, check
from jaxrl_llm.samplers.slot_batch import Capacity, Prefix, SlotBatch
from jaxrl_llm.samplers.weights import deleted

Group = tuple[int, list[Completion]]
_TURNS = 16  # of the event loop, in which an environment's answer becomes the next request; it takes four


@dataclass(kw_only=True)
class Counters:
    """What was done since the last call of `metrics`: tokens, slot-steps of decoding, and seconds of work."""

    generated: int = 0
    prefilled: int = 0
    slot_steps: int = 0
    seconds: float = 0.0


@dataclass(eq=False, kw_only=True)
class Engine:
    """A running embedded sampler; see EmbeddedSampler for the fields.

    A call joins the running batch if the batch's shapes hold it; else it waits until the batch is empty and a larger
    one takes its place. A call that nobody listens to any more frees its slots at the next chunk. Where a device's memory
    does not hold all slots, there are as many as it holds, which is announced.

    Attributes:
      policy: the model.
      serve: the learner's parameters -> those to decode with.
      tokenizer: decodes token ids to the text that stop strings are looked for in; None where there are none.
      max_length: most tokens of a prefix and its completion together.
      slots: most sequences decoded at a time.
      decode_chunk: decode steps between two looks of the host.
      prefill_tokens: most tokens of a block of prompts, padding included.
      cache: dtype of cached keys and values; None is the policy's.
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
    version: int = field(default=-1, init=False)

    # All processes of a run ask it alike, and decode together.
    everywhere = True

    def __post_init__(self) -> None:
        self._params: dict[str, Any] | None = None
        self._waiting: deque[Prefix] = deque()
        self._requests: set[Request] = set()
        self._task: asyncio.Task | None = None
        self._programs: set[tuple] = set()
        self._counters = Counters()
        self._closed = False
        self._free: int | None = None  # bytes of a device without a cache; None where they are not known
        self._announced: set[Capacity] = set()
        self._fitted: dict[Capacity, Capacity] = {}

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each bucket of shapes that was met."""
        return len(self._programs)

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingSettings, seeds: Sequence[int]
    ) -> AsyncIterator[Group]:
        """Yields (index of the prefix, its n completions) as groups finish.

        Draw t of sample i of prefix j depends on (seeds[j], i, t) and the logits alone. Log-probs are float32, of the
        distribution that the token was drawn from; greedy tokens report the untempered softmax.

        Args:
          prefixes: int [T] token ids each, 1 to max_length - 1 of them.
          n: completions of each prefix.
          settings: how tokens are drawn; other values compile nothing new.
          seeds: one for each prefix, 0 <= seed < 2^64.

        Raises:
          ValueError: where an argument is not as described; nothing is sampled then.
          RuntimeError: before the first `publish`, and after `close`.
        """
        if self._params is None or self._closed:
            raise RuntimeError(
                "the sampler is closed" if self._closed else "the sampler has no weights yet: publish() first"
            )
        prefixes = [np.asarray(prefix) for prefix in prefixes]
        request = Request(prefixes=prefixes, n=n, settings=settings, seeds=seeds, max_length=self.max_length)
        check(request, self.policy.architecture.vocabulary_size, self.tokenizer)
        return self._stream(request)

    async def publish(self, params: Params, version: int) -> None:
        """Serves `params` as `version`, from the next chunk on; what is in flight goes on with the cache that it has.

        Raises:
          ValueError: where `params` are not those of the policy.
        """
        self._params, self.version = self.serve(params), version

    async def close(self) -> None:
        """Ends what is running: its listeners get a RuntimeError. Frees the weights."""
        self._closed, self._params = True, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> Mapping[str, float]:
        """Counters and times since the last call; occupancy is the share of slot-steps that gave a kept token."""
        done, self._counters = self._counters, Counters()
        return {
            "sampler/generated_tokens": float(done.generated),
            "sampler/prefill_tokens": float(done.prefilled),
            "sampler/tokens_per_s": done.generated / done.seconds if done.seconds else 0.0,
            "sampler/occupancy": done.generated / done.slot_steps if done.slot_steps else 0.0,
            "sampler/seconds": done.seconds,
            "sampler/compilations": float(self.compilations),
        }

    async def _stream(self, request: Request) -> AsyncIterator[Group]:
        self._requests.add(request)
        self._waiting.extend((request, index) for index in range(len(request.prefixes)))
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
        """Serves all requests, then ends, and with it the cache."""
        batch: SlotBatch | None = None
        try:
            await self._look_at_memory()
            while True:
                while self._waiting and not self._waiting[0][0].open:
                    self._waiting.popleft()
                if batch is None or not (batch.busy or self._fits(batch)):
                    if not self._waiting:
                        return
                    batch = None  # its cache goes before the next one comes
                    wanted = self._capacity({request for request, _ in self._waiting})
                    given = self._fitting(wanted)
                    if given != wanted and wanted not in self._announced:
                        self._announced.add(wanted)
                        room.announce(self.policy, wanted, given, self._free or 0, self.cache)
                    batch = SlotBatch(self.policy, given, self._programs, self.cache)
                await self._advance(batch)
        except asyncio.CancelledError:
            self._fail(RuntimeError("the sampler was closed, or its event loop ended, while it was sampling"))
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._task = None

    async def _advance(self, batch: SlotBatch) -> None:
        """Refills the slots, runs one chunk and hands on what finished."""
        started, params, version = time.perf_counter(), self._params, self.version
        if params is None or deleted(params):
            raise RuntimeError(
                "the learner donated the weights that the sampler shares: publish() after each update "
                "and before sampling, "
                "or set embedded.EmbeddedSampler.share_weights = False"
            )
        while not batch.place(params, version) and batch.free() and (block := self._next_block(batch)):
            self._counters.prefilled += sum(len(request.prefixes[index]) for request, index in block)
            batch.prefill(block, params, version)
        chunk = batch.step(params, self.decode_chunk)
        await _finished(chunk)
        kept, steps = batch.collect(chunk, version, self._text)
        self._counters.generated += kept
        self._counters.slot_steps += steps * batch.capacity.slots
        self._counters.seconds += time.perf_counter() - started

    def _next_block(self, batch: SlotBatch) -> list[Prefix]:
        """The next waiting prefixes, up to `prefill_tokens` and up to the first that the batch does not hold."""
        block: list[Prefix] = []
        longest = 0
        while self._waiting:
            request, index = self._waiting[0]
            longest = max(longest, len(request.prefixes[index]))
            full = bool(block) and prod(batch.block_shape(len(block) + 1, longest)) > self.prefill_tokens
            if full or not self._fits(batch):
                break
            self._waiting.popleft()
            if request.open:
                block.append((request, index))
        return block

    def _capacity(self, requests: set[Request]) -> Capacity:
        return Capacity.of(list(requests), max_slots=self.slots, shards=self.policy.partitioner.batch_shards)

    async def _look_at_memory(self) -> None:
        """Asks what is free, while there is no cache and what made the weights has given back its memory."""
        if self._params is not None and not deleted(self._params):
            await _finished(self._params)
        self._fitted.clear()
        self._free = room.free_bytes(self.policy.partitioner.mesh.local_devices)

    def _fitting(self, wanted: Capacity) -> Capacity:
        """The capacity with as many slots as a device has room for."""
        if wanted not in self._fitted:
            self._fitted[wanted] = room.fitting(self.policy, wanted, self._free, self.cache)
        return self._fitted[wanted]

    def _fits(self, batch: SlotBatch) -> bool:
        """Whether the batch holds the request at the head of the queue, with the slots that there is room for at its length."""
        if not self._waiting:
            return False
        held, wanted = batch.capacity, self._capacity({self._waiting[0][0]})
        if wanted.length <= held.length and wanted.penalised <= held.penalised:
            wanted = self._fitting(replace(wanted, length=held.length, penalised=held.penalised))
        return held.holds(wanted)

    def _fail(self, error: Exception) -> None:
        self._waiting.clear()
        for request in self._requests:
            request.groups.put_nowait(error)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


async def _finished(chunk: Any) -> None:
    """Waits for a chunk; several processes, which all run the engine, look at what to start next at the same point.

    A thread's end comes sooner or later on one of them than on another, and so would requests that follow on an answer.
    """
    if jax.process_count() == 1:
        await asyncio.to_thread(jax.block_until_ready, chunk)
        return
    jax.block_until_ready(chunk)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
