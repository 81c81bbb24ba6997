"""A batch of slots: prompts are prefilled in blocks, copied into free slots and decoded a chunk at a time."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np

from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.transformer import Cache
from jaxrl_llm.samplers.embedded import choose, decode, parking
from jaxrl_llm.samplers.requests import Decode, Draft, Request

Prefix = tuple[Request, int]  # a request and the index of one of its prefixes

_SHORTEST = 16  # tokens of the shortest bucket: shorter ones would compile more programs and save nothing
_STOP_IDS = 4  # fewest stop ids that a batch has room for
_STATE = ("last", "position", "drawn", "done")  # the fields of Slots that a chunk changes
_REFILLS = 16  # refills that write fewer slots than a 16th of a batch's are one program
_TOLD = 64  # tokens of the shortest bucket between two turns: messages are seldom much longer


def _shortest() -> int:
    """Returns the shortest cache of a slot, in tokens."""
    return max(_SHORTEST, caches.page())


def bucket(size: int, unit: int = 1) -> int:
    """Returns the smallest unit x 2^k that holds `size`."""
    return unit << max(0, -(-size // unit) - 1).bit_length()


def bytes_of(prefix: Prefix) -> bytes:
    """Returns the place of a prefix's adapters and its token ids as bytes, by which equal prefixes are found."""
    request, index = prefix
    return np.asarray([request.place, *request.prefixes[index]], np.int32).tobytes()


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The fixed shapes of a batch.

    Attributes:
      slots: sequences at a time.
      length: tokens of a slot's cache.
      stop_ids: stop ids of a slot.
      penalised: whether seen tokens are recorded, for a repetition penalty.
    """

    slots: int
    length: int
    stop_ids: int
    penalised: bool

    @classmethod
    def of(cls, requests: Sequence[Request], *, max_slots: int, shards: int) -> "Capacity":
        """Returns the smallest buckets that hold `requests`; rows fill the mesh's batch shards."""
        asked = sum(request.sequences for request in requests)
        slots = bucket(max(asked, *(request.at_once for request in requests)), shards)
        length = bucket(max(request.length for request in requests), _shortest())
        longest, page = max(request.max_length for request in requests), caches.page()
        return cls(
            slots=min(slots, -(-max_slots // shards) * shards),
            length=min(length, -(-longest // page) * page),
            stop_ids=bucket(max(len(request.settings.stop_token_ids) for request in requests), _STOP_IDS),
            penalised=any(request.settings.repetition_penalty != 1 for request in requests),
        )

    def holds(self, other: "Capacity") -> bool:
        return (
            self.slots >= other.slots
            and self.length >= other.length
            and self.stop_ids >= other.stop_ids
            and self.penalised >= other.penalised
        )


@dataclass(kw_only=True)
class Counters:
    """Tokens, slot-steps of decoding, and seconds of a sampler's work since the last call of its `metrics`."""

    generated: int = 0
    prefilled: int = 0
    again: int = 0
    kept: int = 0
    evicted: int = 0
    slot_steps: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Returns the counters by name; occupancy is the share of slot-steps that gave a kept token."""
        return {
            "sampler/generated_tokens": float(self.generated),
            "sampler/prefill_tokens": float(self.prefilled),
            "sampler/prefill_again_tokens": float(self.again),
            "sampler/kept_tokens": float(self.kept),
            "sampler/evicted_tokens": float(self.evicted),
            "sampler/tokens_per_s": self.generated / self.seconds if self.seconds else 0.0,
            "sampler/occupancy": self.generated / self.slot_steps if self.slot_steps else 0.0,
            "sampler/seconds": self.seconds,
        }


@dataclass(eq=False)
class Recorded:
    """The experts of the tokens of a block's prompts, [N, T, L, k], copied from the device at the first use."""

    device: jax.Array

    @cached_property
    def host(self) -> np.ndarray:
        return np.asarray(self.device)


@dataclass(kw_only=True)
class Block:
    """Prefilled prompts: rows of `cache`, `tokens` (padded with -1) and `places` of their adapters, and the sequences that are still to be copied into slots."""

    cache: Cache
    tokens: np.ndarray
    places: np.ndarray
    version: int
    drafts: deque[tuple[int, Draft]]
    routes: Recorded | None = None


class SlotBatch:
    """Sequences that are decoded together, and the prompts prefilled for the next ones."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        programs: set[tuple],
        dtype: str | None = None,
        record: bool = False,
        keep: bool = False,
    ):
        """Creates empty slots; `programs` collects the compiled shapes; `dtype` is the cache's, or None for the policy's; `record` keeps the
        experts of each token; `keep` parks slots whose conversation may go on."""
        self.policy, self.capacity, self._programs, self._dtype, self._record = (
            policy,
            capacity,
            programs,
            dtype,
            record,
        )
        self._slots = decode.Slots.empty(capacity.slots, capacity.stop_ids)
        self._drafts: list[Draft | None] = [None] * capacity.slots
        self._block: Block | None = None
        self._programs.add(("empty", capacity))
        self._cache, self._seen = decode.empty(
            policy=policy, slots=capacity.slots, length=capacity.length, penalised=capacity.penalised, dtype=dtype
        )
        self.whole = capacity  # the capacity of the batch before it is resized
        self.parking: parking.Parking | None = None  # until a slot is parked
        self._keeps = keep and not (record or capacity.penalised) and self._cache.keys() == parking.KEPT

    @property
    def busy(self) -> bool:
        return self._block is not None or any(draft is not None for draft in self._drafts)

    def left(self, steps: int = 0) -> int | None:
        """Returns the number of sequences with more than `steps` tokens to draw, as if none stopped earlier; None where a block or
        turns may add others."""
        live = [slot for slot, draft in enumerate(self._drafts) if draft is not None and draft.request.open]
        turns = any(self._drafts[slot].request.conversation for slot in live)  # type: ignore[union-attr]
        if self._block is not None or self.parking or turns:
            return None
        return int(np.sum(self._slots.limit[live] - self._slots.drawn[live] > steps))

    @property
    def read(self) -> bool:
        """Whether the host ends sequences itself, by searching their text."""
        return any(draft is not None and draft.request.settings.stop_strings for draft in self._drafts)

    def resize(self, slots: int) -> None:
        """Moves the live sequences, in their order, to a batch of `slots` slots."""
        gone = set(self.free())
        live = [slot for slot in range(self.capacity.slots) if slot not in gone]
        source = np.zeros(slots, np.int32)
        source[: len(live)] = live
        self._programs.add(("resize", self.capacity, slots))
        self._cache, self._seen = decode.resized(self._cache, self._seen, source, policy=self.policy)
        held, self._slots = self._slots, decode.Slots.empty(slots, self.capacity.stop_ids)
        for new, old in zip(jax.tree.leaves(self._slots), jax.tree.leaves(held), strict=True):
            new[: len(live)] = old[live]
        self._drafts = [*(self._drafts[slot] for slot in live), *[None] * (slots - len(live))]
        self.capacity = replace(self.capacity, slots=slots)

    def free(self) -> list[int]:
        """Returns the free slots, among them those of requests that were given up, which it frees."""
        for slot, draft in enumerate(self._drafts):
            if draft is not None and not draft.request.open:
                self._release(slot)
        kept = self.parking or ()
        return [slot for slot, draft in enumerate(self._drafts) if draft is None and slot not in kept]

    @property
    def room(self) -> bool:
        """Whether any slot is free or parked."""
        return bool(self.free() or self.parking)

    def block_shape(self, rows: int, longest: int) -> tuple[int, int]:
        """Returns the rows and tokens, padding included, of a block of `rows` prompts of up to `longest` tokens."""
        length = min(bucket(longest, _shortest()), self.capacity.length)
        return bucket(rows, self.policy.partitioner.batch_shards), length

    def prefill(self, prefixes: Sequence[Prefix], params: Params, version: int) -> int:
        """Prefills a block of prompts, equal ones once; their sequences take slots at the next `place`.

        Returns the tokens that were prefilled, without padding.
        """
        rows = {bytes_of(prefix): i for i, prefix in reversed(list(enumerate(prefixes)))}
        places = {held: row for row, held in enumerate(sorted(rows, key=rows.__getitem__))}
        longest = max(len(request.prefixes[index]) for request, index in prefixes)
        tokens = np.full(self.block_shape(len(places), longest), decode.NO_TOKEN, np.int32)
        sets, drafts = np.zeros(len(tokens), np.int32), deque[tuple[int, Draft]]()
        for request, index in prefixes:
            row = places[bytes_of((request, index))]
            sets[row] = request.place
            tokens[row, : len(request.prefixes[index])] = request.prefixes[index]
            drafts.extend((row, draft) for draft in request.drafts(index))
        cache, routes = self._prefilled(params, tokens, sets)
        self._block = Block(cache=cache, tokens=tokens, places=sets, version=version, drafts=drafts, routes=routes)
        return int((tokens != decode.NO_TOKEN).sum())

    def place(self, params: Params, version: int) -> bool:
        """Copies sequences of the block into free slots; returns whether some are left."""
        block, free = self._block, self.free()
        wanted = 0 if block is None else sum(draft.request.open for _, draft in block.drafts)
        while len(free) < wanted and self.parking:
            free.append(self.parking.evict())
        if block is None or not free:
            return block is not None
        if block.version != version:  # the prompts' keys and values follow the newest weights
            (block.cache, block.routes), block.version = self._prefilled(params, block.tokens, block.places), version
        found: list[tuple[int, int]] = []
        while free and block.drafts:
            row, draft = block.drafts.popleft()
            if draft.request.open:
                found.append((free[0], row))
                draft.recorded = None if block.routes is None else (block.routes, row)
                self._assign(free.pop(0), draft)
        slots = self.capacity.slots
        size = bucket(len(found), max(slots // _REFILLS, 1)) if decode.refills_apart() else slots
        pairs = np.full((min(size, slots), 2), slots, np.int32)
        pairs[:, 1], pairs[: len(found)] = 0, np.reshape(found, (-1, 2))
        self._programs.add(("place", self.capacity, block.tokens.shape, len(pairs)))
        self._cache, self._seen = decode.place(
            self._cache, self._seen, block.cache, block.tokens, *pairs.T, policy=self.policy
        )
        if not block.drafts:
            self._block = None
        return self._block is not None

    def parked(self, request: Request, version: int) -> int | None:
        """Returns the parked slot in which a turn of a conversation continues; None where the turn is to be prefilled."""
        if self.parking is None or request.conversation is None or request.sequences != 1:
            return None
        return self.parking.find(
            request.conversation.id, np.asarray(request.prefixes[0], np.int32), version, request.place
        )

    def resume(self, turns: Mapping[int, Request], params: Params) -> tuple[int, int]:
        """Continues in parked slots, {slot: its next turn}; returns the numbers of kept and of prefilled tokens."""
        assert self.parking is not None  # `parked` found the slots
        held = {slot: len(self.parking.take(slot).tokens) for slot in turns}
        new = [np.asarray(request.prefixes[0][held[slot] :], np.int32) for slot, request in turns.items()]
        width = min(bucket(max(map(len, new)), _TOLD), self.capacity.length)
        tokens = np.zeros((bucket(len(turns), self.policy.partitioner.batch_shards), width), np.int32)
        starts, slots = np.zeros(len(tokens), np.int32), np.full(len(tokens), self.capacity.slots, np.int32)
        places = np.zeros(len(tokens), np.int32)
        for row, (slot, more) in enumerate(zip(turns, new)):
            tokens[row, : len(more)], starts[row], slots[row] = more, held[slot], slot
            places[row] = turns[slot].place
        self._programs.add(("lengthen", self.capacity, tokens.shape))
        self._cache = parking.lengthen(params, self._cache, tokens, starts, slots, places, policy=self.policy)
        for slot, request in turns.items():
            self._assign(slot, request.drafts(0)[0])
        return sum(held.values()), sum(map(len, new))

    def step(self, served: decode.Served, steps: int, after: decode.Chunk | None = None) -> decode.Chunk:
        """Starts a chunk of decode steps on the device, from the slots' state or from the end of the chunk `after`."""
        cut = any(draft is not None and choose.filters(draft.request.settings) for draft in self._drafts)
        self._programs.add(("decode", self.capacity, steps, cut))
        at = self._slots
        # The state that a chunk leaves and the host's have the same layout, so that one program takes both.
        if jax.process_count() == 1:
            place, state = self.policy.partitioner.replicated, at if after is None else after
            at = at._replace(**{name: jax.device_put(getattr(state, name), place) for name in _STATE})
        self._cache, self._seen, chunk = decode.decode(
            served, self._cache, self._seen, at, policy=self.policy, steps=steps, cut=cut, record=self._record,
        )  # fmt: skip
        return chunk

    def collect(self, chunk: decode.Chunk, version: int, text: Decode) -> tuple[int, int]:
        """Reads a chunk's draws and delivers finished sequences; returns the numbers of tokens kept and of steps run."""
        tokens, logprobs, drawn, done, routes = jax.device_get(chunk[:5])
        slots = self._slots
        new = drawn - slots.drawn
        slots.last[:] = np.where(new > 0, tokens[np.arange(len(new)), new - 1], slots.last)
        slots.position[:] += new
        slots.drawn[:] = drawn
        kept = 0
        for slot, draft in enumerate(self._drafts):
            if draft is None:
                continue
            before = draft.count
            if routes is not None:
                draft.record(routes[slot, : new[slot]].copy())
            stopped = draft.extend(tokens[slot, : new[slot]], logprobs[slot, : new[slot]], version, text)
            kept += draft.count - before
            if stopped or done[slot]:
                draft.request.finish(draft, "stop" if stopped or draft.ended_by_id() else "length")
                self._release(slot)
                self._park(slot, draft)
        return kept, int(new.max())

    def _prefilled(self, params: Params, tokens: np.ndarray, places: np.ndarray) -> tuple[Cache, Recorded | None]:
        self._programs.add(("prefill", tokens.shape))
        holds = self.policy.architecture.delta is not None
        counts = np.maximum(np.sum(tokens != decode.NO_TOKEN, axis=1) - 1, 0).astype(np.int32) if holds else None
        cache, routes = decode.prefill(
            params, np.maximum(tokens, 0), counts, places, policy=self.policy, dtype=self._dtype, record=self._record
        )
        return cache, None if routes is None else Recorded(routes)

    def _assign(self, slot: int, draft: Draft) -> None:
        slots, request, settings = self._slots, draft.request, draft.request.settings
        seed, stops = request.seeds[draft.index], settings.stop_token_ids
        slots.last[slot], slots.position[slot] = draft.prefix[-1], len(draft.prefix) - 1
        slots.drawn[slot], slots.limit[slot] = 0, request.limit(draft.index)
        slots.min_tokens[slot], slots.done[slot] = settings.min_tokens, False
        slots.stop_ids[slot], slots.stop_ids[slot, : len(stops)] = decode.NO_TOKEN, stops
        slots.seed[slot], slots.sample[slot] = (seed >> 32, seed & 0xFFFFFFFF), draft.sample
        slots.choice.set(slot, settings)
        slots.place[slot] = request.place
        self._drafts[slot] = draft

    def _release(self, slot: int) -> None:
        self._slots.done[slot], self._drafts[slot] = True, None

    def _park(self, slot: int, draft: Draft) -> None:
        """Parks a slot whose sequence has ended for the next turn of its conversation.

        The last token drawn has not been fed. A slot that is done is fed its last token at one position at every step, after the kept entries.
        """
        conversation, version = draft.request.conversation, draft.version
        if not self._keeps or conversation is None or version is None or not draft.request.open:
            return
        tokens = np.concatenate([draft.prefix, draft.tokens])[:-1].astype(np.int32)
        if len(tokens) < self.capacity.length - 1:
            if self.parking is None:
                self.parking = parking.Parking()
            self.parking.park(
                slot,
                parking.Parked(conversation=conversation.id, tokens=tokens, version=version, place=draft.request.place),
            )
