"""The device programs of the embedded sampler: prefill of prompts, their copy into slots, and a chunk of decode steps; and the wait for one.

Small per-slot arrays live on the host and travel with each call; the cache and the table of seen tokens stay on the
device and are donated from call to call. Shapes are fixed, so each program compiles once for each bucket.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.kernels.token_stats import ordered
from jaxrl_llm.models.experts import Report
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.transformer import Apart, Cache
from jaxrl_llm.samplers.embedded.choose import Choice, HostOrDevice, draw, noise, plain, read_temperature, sample_keys
from jaxrl_llm.samplers.embedded.pages import Shared
from jaxrl_llm.samplers.embedded.shelf import of_rows
from jaxrl_llm.samplers.requests import Draft, Request

Prefix = tuple[Request, int]  # a request and the index of one of its prefixes

NO_TOKEN = -1
_STATE = ("last", "position", "drawn", "done")  # the fields of Slots that a chunk changes
_TURNS = 16  # turns of the event loop in which an environment's answer becomes the next request; it takes four


def bytes_of(prefix: Prefix) -> bytes:
    """Returns the place of a prefix's adapters and its token ids as bytes, by which equal prefixes are found."""
    request, index = prefix
    return np.asarray([request.place, *request.prefixes[index]], np.int32).tobytes()


@dataclass(eq=False)
class Recorded:
    """The experts of the tokens of a block's prompts, [N, T, L, k], copied from the device at the first use."""

    device: jax.Array

    @cached_property
    def host(self) -> np.ndarray:
        return np.asarray(self.device)


@dataclass(kw_only=True)
class Block:
    """Prefilled prompts: rows of `cache`, `tokens` (padded with -1) and `places` of their adapters, and the sequences that are still to be
    copied into slots; `shared` has the pages of rows that are in slots."""

    cache: Cache
    tokens: np.ndarray
    places: np.ndarray
    version: int
    drafts: deque[tuple[int, Draft]]
    routes: Recorded | None = None
    shared: Shared = field(default_factory=dict)

    def length(self, row: int) -> int:
        """Returns the number of tokens of a row."""
        return int(np.sum(self.tokens[row] != NO_TOKEN))


def padded(pairs: Sequence[tuple[int, int]], size: int, none: int) -> np.ndarray:
    """Returns int32 [size, 2] pairs, and (none, 0) for the rest."""
    found = np.full((size, 2), (none, 0), np.int32)
    found[: len(pairs)] = np.reshape(pairs, (-1, 2))
    return found


class Slots(NamedTuple):
    """The host's state of each slot: arrays [S], and [S, E] stop ids.

    `last` is the token to feed next, `position` its position; `drawn` counts the response's tokens, `limit` bounds them.
    """

    last: HostOrDevice
    position: HostOrDevice
    drawn: HostOrDevice
    limit: HostOrDevice
    min_tokens: HostOrDevice
    sample: HostOrDevice
    done: HostOrDevice
    stop_ids: HostOrDevice
    seed: HostOrDevice  # uint32 [S, 2]: high and low half
    choice: Choice
    place: HostOrDevice  # int32 [S]: which set of adapters, where several are served
    table: HostOrDevice | None = None  # int32 [S, N]: the numbers of the slots' pages, where the cache is one of pages

    @classmethod
    def empty(cls, slots: int, stop_ids: int) -> "Slots":
        """Returns `slots` free slots, with room for `stop_ids` stop ids each."""
        counters = {name: np.zeros(slots, np.int32) for name in cls._fields[:6]}
        return cls(
            **counters,
            done=np.ones(slots, bool),
            stop_ids=np.full((slots, stop_ids), NO_TOKEN, np.int32),
            seed=np.zeros((slots, 2), np.uint32),
            choice=Choice.empty(slots),
            place=np.zeros(slots, np.int32),
        )

    def set(self, slot: int, draft: Draft) -> None:
        """Lets a slot continue a sequence."""
        request, settings = draft.request, draft.request.settings
        seed, stops = request.seeds[draft.index], settings.stop_token_ids
        self.last[slot] = draft.tokens[-1] if draft.count else draft.prefix[-1]
        self.position[slot], self.place[slot] = len(draft.prefix) + draft.count - 1, request.place
        self.drawn[slot], self.limit[slot] = draft.count, request.limit(draft.index)
        self.min_tokens[slot], self.done[slot] = settings.min_tokens, False
        self.stop_ids[slot], self.stop_ids[slot, : len(stops)] = NO_TOKEN, stops
        self.seed[slot], self.sample[slot] = (seed >> 32, seed & 0xFFFFFFFF), draft.sample
        self.choice.set(slot, settings)


def on_devices(slots: Slots, state: "Slots | Chunk", policy: Policy) -> Slots:
    """Returns slots with what a chunk changes of them taken from `state`, the host's or a chunk's, in one layout, so that one program takes both."""
    if jax.process_count() > 1:
        return slots
    place = policy.partitioner.replicated
    return slots._replace(**{name: jax.device_put(getattr(state, name), place) for name in _STATE})


class Served(NamedTuple):
    """The weights that decoding reads: the policy's, and where `apart` is given, the layers' from there in their place."""

    params: Params
    apart: Apart | None = None


class Chunk(NamedTuple):
    """The results of a chunk of steps: tokens and log-probs [S, steps], draws so far and finished slots [S]; where recorded, the
    experts of the token fed at each step, [S, steps, L, k]; and its slots' last tokens and positions, so that another chunk may start
    before the host has seen this one."""

    tokens: jax.Array
    logprobs: jax.Array
    drawn: jax.Array
    done: jax.Array
    routes: jax.Array | None = None
    last: jax.Array | None = None
    position: jax.Array | None = None


def empty(*, policy: Policy, **shape: Any) -> tuple[Cache, Bool[Array, "S V"]]:
    """Returns an empty cache, see `Policy.cache`, and the table of seen tokens, [slots, V], or [slots, 0] where no slot is penalised."""
    with policy.partitioner.here():
        return _empty(policy=policy, **shape)


@partial(jax.jit, static_argnames=("policy", "slots", "length", "penalised", "dtype", "pages"))
def _empty(
    *, policy: Policy, slots: int, length: int, penalised: bool, dtype: str | None = None, pages: int = 0
) -> tuple[Cache, Bool[Array, "S V"]]:
    vocabulary = policy.architecture.vocabulary_size if penalised else 0
    seen = policy.partitioner.constrain(jnp.zeros((slots, vocabulary), bool), ("batch", "vocabulary"))
    return policy.constrained(policy.cache(slots, length, dtype, pages)), seen


@partial(jax.jit, static_argnames=("policy", "dtype", "record"))
def prefill(
    params: Params,
    tokens: Int[Array, "N T"],
    counts: Int[Array, " N"] | None = None,
    places: Int[Array, " N"] | None = None,
    *,
    policy: Policy,
    dtype: str | None = None,
    record: bool = False,
) -> tuple[Cache, jax.Array | None]:
    """Computes the cache of right-padded prompts; with `record`, also the experts of their tokens, [N, T, L, k].

    `counts` are the tokens of each prompt that enter a state, all but its last, which `decode` feeds once more; None where no layer
    holds a state. `places` are the prompts' sets of adapters, where several are served.
    """
    params = of_rows(params, places)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = policy.cache(tokens.shape[0], tokens.shape[1], dtype)
    # Blocks have many shapes, and a new one is compiled within a step.
    _, cache, report = policy.looped.routed_extend(params, cache, tokens, positions, fresh=True, counts=counts)
    if report is None or not record:
        return cache, None
    routes = _chosen(report)
    return cache, policy.partitioner.constrain(routes, (None,) * routes.ndim)


def refills_apart() -> bool:
    """Returns whether `place` writes the refilled slots alone, so that fewer of them are less work."""
    return dispatch.device().platform == "gpu"


@partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache", "seen"))
def place(
    cache: Cache,
    seen: Bool[Array, "S W"],
    block: Cache,
    tokens: Int[Array, "N T"],
    slots: Int[Array, " K"],
    rows: Int[Array, " K"],
    parts: Int[Array, "2 M"] | None = None,
    *,
    policy: Policy,
) -> tuple[Cache, Bool[Array, "S W"]]:
    """Copies prefilled row rows[k] into slot slots[k]; a slot beyond the last one is none. `tokens` is padded with -1.

    Of a cache of pages, page parts[0, m] gets part parts[1, m] of the block's entries, cut into pages; one beyond the last is none.

    On GPUs it is a scatter, which writes those slots alone, in place. Elsewhere the prompts' places in all slots are written: for a
    scatter TPU's compiler changes the whole cache's layout, and a CPU's copies the rows first.
    """
    scatters = refills_apart()
    source = jnp.full(seen.shape[0], -1, rows.dtype).at[slots].set(rows, mode="drop")
    fresh, taken = source >= 0, jnp.maximum(source, 0)
    if scatters or parts is not None:
        block = policy.constrained(block, gathered=True)  # each device takes rows for its own slots

    def copied(old: jax.Array, new: jax.Array) -> jax.Array:
        axis = caches.entry_axis()
        if parts is not None:
            return old.at[:, parts[0]].set(caches.parts(new, old.shape[axis])[:, parts[1]], mode="drop")
        filled = (*[slice(None)] * (axis - 2), slice(new.shape[axis]))
        if scatters:
            return old.at[:, slots, *filled].set(new[:, rows], mode="drop")
        kept = old[:, :, *filled]
        return old.at[:, :, *filled].set(jnp.where(fresh[:, None, None, None], new[:, taken], kept))

    def replaced(old: jax.Array, new: jax.Array) -> jax.Array:
        if scatters:
            return old.at[:, slots].set(new[:, rows], mode="drop")
        return jnp.where(fresh.reshape(-1, *(1,) * (old.ndim - 2)), new[:, taken], old)

    change = {"k": copied, "v": copied, "state": replaced, "conv": replaced}
    cache = {name: change[name](entries, block[name]) for name, entries in cache.items()}
    width = seen.shape[1]
    index = jnp.where(tokens < 0, width, tokens)
    table = jnp.zeros((tokens.shape[0], width), bool).at[jnp.arange(len(tokens))[:, None], index].set(True, mode="drop")
    seen = policy.partitioner.constrain(jnp.where(fresh[:, None], table[taken], seen), ("batch", "vocabulary"))
    return policy.constrained(cache), seen


@partial(jax.jit, static_argnames=("policy",))
def resized(
    cache: Cache, seen: Bool[Array, "S W"], source: Int[Array, " N"], *, policy: Policy
) -> tuple[Cache, Bool[Array, "N W"]]:
    """Returns a cache and a table of N slots that hold the contents of the slots source[n]; every part of a cache has its slots in axis 1."""
    seen = policy.partitioner.constrain(seen[source], ("batch", "vocabulary"))
    return policy.constrained({name: entries[:, source] for name, entries in cache.items()}), seen


@partial(jax.jit, static_argnames=("policy", "steps", "cut", "record"), donate_argnames=("cache", "seen"))
def decode(
    served: Served,
    cache: Cache,
    seen: Bool[Array, "S W"],
    slots: Slots,
    *,
    policy: Policy,
    steps: int,
    cut: bool,
    record: bool = False,
) -> tuple[Cache, Bool[Array, "S W"], Chunk]:
    """Draws up to `steps` tokens of each slot that is not done; ends early where all are, except on GPUs, whose host would have to wait
    for each step to know that.

    The first step feeds a prompt's last token once more, so that every draw of a response is made by this one program.
    """
    if slots.table is not None:
        cache = {**cache, "table": jnp.asarray(slots.table)}
    count = len(slots.last)
    keys = sample_keys(jnp.asarray(slots.seed), jnp.asarray(slots.sample))
    params, apart = of_rows(served, slots.place)
    head = policy.head(params).astype(policy.compute_dtype)
    if policy.bitwise:  # gathered once instead of at every step
        head = policy.partitioner.constrain(head, (None, None))
    rows = jnp.arange(count)

    def step(carry: tuple) -> tuple:
        i, cache, seen, last, chunk = carry
        position = slots.position + chunk.drawn - slots.drawn
        hidden, cache, report = policy.routed_extend(params, cache, last[:, None], position[:, None], apart=apart)
        if policy.bitwise:
            with policy.ordering():
                read = ordered.read(hidden[:, 0], head, read_temperature(slots.choice))
            logits = read.logits
        else:
            logits = jnp.einsum("sd,vd->sv", hidden[:, 0], head, preferred_element_type=jnp.float32)
        logits = policy.partitioner.constrain(logits, ("batch", "vocabulary"))
        gumbel = noise(keys, chunk.drawn, logits.shape[1])
        token, logprob = draw(logits, gumbel, slots.choice, seen if seen.shape[1] else None, cut=cut)
        if policy.bitwise:
            with policy.ordering():
                same = ordered.logprobs(read, hidden[:, 0], head, token, read_temperature(slots.choice))
            logprob = jnp.where(plain(slots.choice), same, logprob)
        token = jnp.where(chunk.done, last, token)
        seen = seen.at[rows, token].set(True, mode="drop") if seen.shape[1] else seen
        drawn = chunk.drawn + ~chunk.done
        stopped = jnp.any(slots.stop_ids == token[:, None], axis=1) & (drawn >= slots.min_tokens)
        chunk = Chunk(
            chunk.tokens.at[:, i].set(token),
            chunk.logprobs.at[:, i].set(logprob),
            drawn,
            chunk.done | stopped | (drawn >= slots.limit),
            chunk.routes
            if report is None or chunk.routes is None
            else chunk.routes.at[:, i].set(_chosen(report)[:, 0]),
        )
        return i + 1, cache, seen, token, chunk

    carry = (jnp.int32(0), cache, seen, jnp.asarray(slots.last), _before(slots, steps, policy, record))
    if dispatch.device().platform == "gpu":
        _, cache, seen, last, chunk = jax.lax.fori_loop(0, steps, lambda _, carry: step(carry), carry)
    else:
        _, cache, seen, last, chunk = jax.lax.while_loop(lambda c: (c[0] < steps) & ~jnp.all(c[4].done), step, carry)
    chunk = chunk._replace(last=last, position=slots.position + chunk.drawn - slots.drawn)
    cache = {name: entries for name, entries in cache.items() if name != "table"}
    whole = jax.tree.map(lambda x: policy.partitioner.constrain(x, (None,) * x.ndim), chunk)
    return policy.constrained(cache), policy.partitioner.constrain(seen, ("batch", "vocabulary")), whole


async def finished(chunk: Any) -> None:
    """Waits for a chunk, such that several processes, which all run the engine, choose the next programs at the same point.

    A thread would end at different times on each of them, and so would requests that follow an answer come at different times.
    """
    if jax.process_count() == 1:
        await asyncio.to_thread(jax.block_until_ready, chunk)
        return
    jax.block_until_ready(chunk)
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@partial(jax.jit, static_argnames=("policy",))
def layers_apart(params: Params, *, policy: Policy) -> Apart:
    """Returns the parameters of each layer as separate arrays: products read them in place, and need not copy a layer out of its stack
    for each token."""
    return policy.apart(params, (policy.partitioner.batch_shards, 1))


def _before(slots: Slots, steps: int, policy: Policy, record: bool) -> Chunk:
    """Returns a chunk in which nothing is drawn yet."""
    shape = (len(slots.last), steps)
    routes = _no_routes(policy, shape) if record else None
    drawn, done = jnp.asarray(slots.drawn), jnp.asarray(slots.done)
    return Chunk(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), drawn, done, routes)


def _chosen(report: Report) -> jax.Array:
    """Returns the experts of each token, [S, T, L, k]."""
    return jnp.moveaxis(report.chosen, 0, 2)


def _no_routes(policy: Policy, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns recorded experts [*shape, L, k] of tokens that have none; None for a policy without experts."""
    size = policy.architecture.experts
    if size is None:
        return None
    layers = sum(policy.architecture.sparse)
    return jnp.full((*shape, layers, size.chosen), size.unrecorded, size.record_dtype)


def shapes(policy: Policy, slots: int, length: int, dtype: str | None = None, page: int = 0) -> tuple[Any, ...]:
    """Returns the shapes of what `decode` takes beside the parameters, with caches of so many slots and tokens, or of pages for them."""
    placed, each = policy.partitioner.sharding(("batch", None), (slots, 0)), -(-length // page) if page else 0
    seen = jax.ShapeDtypeStruct((slots, 0), bool, sharding=placed)
    pages = slots * each + policy.partitioner.batch_shards if page else 0
    table = jax.ShapeDtypeStruct((slots, each), jnp.int32, sharding=placed) if page else None
    return policy.cache_shapes(slots, page or length, dtype, pages), seen, Slots.empty(slots, 4)._replace(table=table)


def lowered(
    policy: Policy, params: Params, slots: int, length: int, steps: int, dtype: str | None = None, page: int = 0
) -> jax.stages.Lowered:
    """Returns the decode program of `params` (arrays or shapes) with caches as of `shapes`, ready to be compiled."""
    held = shapes(policy, slots, length, dtype, page)
    return decode.lower(Served(params), *held, policy=policy, steps=steps, cut=False)
