"""Samples in the learner's process and mesh: prompts are prefilled and responses decoded in JAX.

One task serves all calls of `sample`, a chunk of decode steps at a time. Programs are started from the event loop's thread, so that
all programs of a process start in one order on every device; only the wait for a chunk runs in a thread, and rewards of finished
groups run meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.kernels.decode_attention.api import NARROW
from jaxrl_llm.models.architecture import PRECISE
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Conversation, Params
from jaxrl_llm.samplers.embedded.slots import Capacity, Prefix, SlotBatch, announce, bytes_of, fitting, free_bytes
from jaxrl_llm.samplers.requests import Request, check


def check_shapes(policy: Policy, params: Params) -> None:
    """Raises ValueError where `params` are not those of `policy`."""

    def check(path: tuple[Any, ...], abstract: jax.ShapeDtypeStruct, x: jax.Array) -> None:
        if x.shape != abstract.shape:
            raise ValueError(
                f"published parameter {jax.tree_util.keystr(path)} is {x.shape}, the policy's is {abstract.shape}"
            )

    jax.tree_util.tree_map_with_path(check, policy.abstract(), params)


def served(policy: Policy, params: Params, *, share: bool, gather: bool) -> dict[str, Any]:
    """Returns `params` in the policy's compute dtype, laid out for decoding.

    Norm scales and routers stay float32, as the layers use them. A leaf that already has the dtype and the layout is the learner's
    own array if `share`, and a copy otherwise; every other leaf is a new array that shares no memory with the learner's,
    so that the sampler may delete it.

    Args:
      policy: whose parameters they are.
      params: the learner's parameters.
      share: whether the learner's own arrays may be served.
      gather: whether weights are whole over the fsdp axis, which saves each decode step their gathering.

    Raises:
      ValueError: where `params` are not those of `policy`.
    """
    partitioner = policy.partitioner
    if gather:
        partitioner = replace(partitioner, rules={**partitioner.rules, "embed": ()})

    check_shapes(policy, params)

    def leaf(path: tuple[Any, ...], axes: tuple, x: jax.Array) -> jax.Array:
        dtype = x.dtype if path[-1].key in PRECISE else policy.compute_dtype
        sharding = partitioner.stored(axes, x.shape)
        if x.dtype == dtype and isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x if share else x.copy()
        if x.dtype == dtype:
            return jax.device_put(x, sharding, may_alias=False)
        # Cast before the transfer: fewer bytes move between devices. A host array goes straight to its shards.
        return jax.device_put(x.astype(dtype), sharding)

    axes = policy.axes()
    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=lambda x: isinstance(x, tuple))


def deleted(params: Params) -> bool:
    """Returns whether the learner donated a shared buffer since it was published."""
    return any(x.is_deleted() for x in jax.tree.leaves(params))


PromptCompletions = tuple[int, list[Completion]]
_TURNS = 16  # of the event loop, in which an environment's answer becomes the next request; it takes four


@dataclass(kw_only=True)
class Counters:
    """What was done since the last call of `metrics`: tokens, slot-steps of decoding, and seconds of work."""

    generated: int = 0
    prefilled: int = 0
    again: int = 0
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
      record: whether completions have the experts of each token.
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
    version: int = field(default=-1, init=False)

    everywhere = True  # all processes of a run ask it alike, and decode together
    converses = True

    def __post_init__(self) -> None:
        self._params: dict[str, Any] | None = None
        self._own: list[jax.Array] = []  # those of them that are not the learner's
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
          conversation: what the prefixes are turns of; the batch is made for its longest turn and for the turns of all.

        Raises:
          ValueError: where an argument is not as described; nothing is sampled then.
          RuntimeError: before the first `publish`, and after `close`.
        """
        if self._params is None or self._closed:
            raise RuntimeError(
                "the sampler is closed" if self._closed else "the sampler has no weights yet: publish() first"
            )
        prefixes = [np.asarray(prefix) for prefix in prefixes]
        request = Request(
            prefixes=prefixes, n=n, settings=settings, seeds=seeds, max_length=self.max_length, conversation=conversation
        )  # fmt: skip
        check(request, self.policy.architecture.vocabulary_size, self.tokenizer)
        return self._stream(request)

    async def publish(self, params: Params, version: int) -> None:
        """Serves `params` as `version`, from the next chunk on; what is in flight goes on with the cache that it has.

        The arrays of the version before are deleted before those of the new one are made, where they are the sampler's own,
        so that two served copies never lie on a device; a chunk that is running keeps what it reads until it ends.

        Raises:
          ValueError: where `params` are not those of the policy; the version before is served on.
        """
        check_shapes(self.policy, params)
        self.retire()
        new = self.serve(params)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True)
        self._own = [array for array, given in pairs if array is not given]
        self._params, self.version = new, version

    def retire(self) -> None:
        """Frees the weights that are served; the next ones are about to be made, and nothing is sampled until they are published."""
        self._params = None
        for array in self._own:
            array.delete()
        self._own = []

    async def close(self) -> None:
        """Ends what is running: its listeners get a RuntimeError. Frees the weights."""
        self._closed, self._params = True, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metrics(self) -> Mapping[str, float]:
        """Returns counters and times since the last call; occupancy is the share of slot-steps that gave a kept token."""
        done, self._counters = self._counters, Counters()
        return {
            "sampler/generated_tokens": float(done.generated),
            "sampler/prefill_tokens": float(done.prefilled),
            "sampler/prefill_again_tokens": float(done.again),
            "sampler/tokens_per_s": done.generated / done.seconds if done.seconds else 0.0,
            "sampler/occupancy": done.generated / done.slot_steps if done.slot_steps else 0.0,
            "sampler/seconds": done.seconds,
            "sampler/compilations": float(self.compilations),
        }

    async def _stream(self, request: Request) -> AsyncIterator[PromptCompletions]:
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
                        announce(self.policy, wanted, given, self._free or 0, self.cache)
                    batch = SlotBatch(self.policy, given, self._programs, self.cache, self.record)
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
                "the learner donated the weights that the sampler shares: publish() after each update, or set embedded.EmbeddedSampler.share_weights = False"
            )
        while not batch.place(params, version) and batch.free() and (block := self._next_block(batch)):
            self._counters.prefilled += batch.prefill(block, params, version)
            self._counters.again += sum(request.conversation.known for request, _ in block if request.conversation)
        chunk = batch.step(params, self.decode_chunk)
        await _finished(chunk)
        kept, steps = batch.collect(chunk, version, self._text)
        self._counters.generated += kept
        self._counters.slot_steps += steps * batch.capacity.slots
        self._counters.seconds += time.perf_counter() - started

    def _next_block(self, batch: SlotBatch) -> list[Prefix]:
        """Returns the next waiting prefixes, up to `prefill_tokens` and up to the first that the batch does not hold."""
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
        return Capacity.of(list(requests), max_slots=self.slots, shards=self.policy.partitioner.batch_shards)

    async def _look_at_memory(self) -> None:
        """Asks what is free, while there is no cache and what made the weights has given back its memory."""
        params = self._params
        if params is not None and not deleted(params):
            try:
                await _finished(params)
            except RuntimeError:
                if not deleted(params):  # a publication came meanwhile
                    raise
        self._fitted.clear()
        self._free = free_bytes(self.policy.partitioner.mesh.local_devices)

    def _fitting(self, wanted: Capacity) -> Capacity:
        """Returns the capacity with as many slots as a device has room for."""
        if wanted not in self._fitted:
            self._fitted[wanted] = fitting(self.policy, wanted, self._free, self.cache)
        return self._fitted[wanted]

    def _fits(self, batch: SlotBatch) -> bool:
        """Returns whether the batch holds the request at the head of the queue, with the slots that there is room for at its length."""
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


@dataclass(frozen=True, kw_only=True)
class EmbeddedSampler:
    """A batch of slots that is refilled as sequences end; each prompt is prefilled once for all its samples.

    Shapes come in powers of two, so a run compiles few programs. The cache lives only while something is sampled.

    Attributes:
      slots: most sequences decoded at a time; a smaller request takes the smallest power of two that holds it. Where a device
        has no room for the cache of so many, there are as many as it has room for, which is said.
      decode_chunk: decode steps between two looks of the host, which refills slots and searches for stop strings.
      prefill_tokens: most tokens of the prompts that are prefilled together, padding included; one prompt always is.
      share_weights: True serves the learner's own arrays where they have the decode dtype and layout; right where
        nothing samples between the start of an update, which donates them, and the next publication. False copies.
      gather_weights: True keeps the weights whole over the fsdp axis while sampling: no gathering in each step, for
        the memory of a copy.
      cache: dtype of cached keys and values; None is the policy's compute dtype. "float8_e4m3fn" takes half the memory and
        half the reading of bfloat16, without scales: values beyond 448 become 448. Log-probs of samples are then those of
        such a cache, and `gap/*` says how far they are from the learner's.
      record_routes: record the experts that each token goes to, for train.Router.replay = "R3" and for `router/differs`.
    """

    slots: int = 512
    decode_chunk: int = 16
    prefill_tokens: int = 8192
    share_weights: bool = True
    gather_weights: bool = False
    cache: str | None = None
    record_routes: bool = False

    def __post_init__(self) -> None:
        components.one_of(self, (None, *NARROW), "cache")
        components.at_least(self, 1, "slots", "decode_chunk", "prefill_tokens")

    def start(self, policy: Policy, tokenizer: Any, *, max_length: int, run_dir: Path | None = None) -> Engine:
        """Returns the running sampler, without weights until the first `publish`; it writes nothing to `run_dir`.

        Raises:
          ValueError: where `max_length`, in tokens of a prompt and its response, is not within 2..max_positions.
        """
        if not 2 <= max_length <= policy.architecture.max_positions:
            raise ValueError(
                f"max_length must be 2..{policy.architecture.max_positions} tokens, the most of the model (got {max_length}): set the lengths of both"
            )
        return Engine(
            policy=policy, serve=partial(served, policy, share=self.share_weights, gather=self.gather_weights), tokenizer=tokenizer, max_length=max_length, slots=self.slots,
            decode_chunk=self.decode_chunk, prefill_tokens=self.prefill_tokens, cache=self.cache,
            record=self.record_routes and policy.architecture.experts is not None,
        )  # fmt: skip
