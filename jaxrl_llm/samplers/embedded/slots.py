"""A batch of slots: prompts are prefilled in blocks, copied into free slots and decoded a chunk at a time."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.transformer import Cache
from jaxrl_llm.samplers.embedded import choose, decode, parking
from jaxrl_llm.samplers.embedded.decode import NO_TOKEN, Block, Prefix, Recorded, bytes_of, padded
from jaxrl_llm.samplers.embedded.pages import Pages
from jaxrl_llm.samplers.embedded.room import Capacity, bucket, shortest
from jaxrl_llm.samplers.requests import Decode, Draft, Request

_REFILLS = 16  # refills that write fewer slots than a 16th of a batch's are one program
_TOLD = 64  # tokens of the shortest bucket between two turns: messages are seldom much longer


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
        self.policy, self.capacity, self._programs = policy, capacity, programs
        self._dtype, self._record = dtype, record
        self._slots = decode.Slots.empty(capacity.slots, capacity.stop_ids)
        self._drafts: list[Draft | None] = [None] * capacity.slots
        self._block: Block | None = None
        self.pages = Pages.of(capacity, policy.partitioner.batch_shards) if capacity.page else None
        self._age = np.zeros(capacity.slots, np.int64)  # of the slots' sequences: the number of those placed before
        self._placed = 0
        self._again: deque[Draft] = deque()  # sequences whose pages others needed
        self._programs.add(("empty", capacity))
        self._cache, self.seen = decode.empty(
            policy=policy, slots=capacity.slots, length=capacity.page or capacity.length, penalised=capacity.penalised,
            dtype=dtype, pages=capacity.pages,
        )  # fmt: skip
        self.whole = capacity  # the capacity of the batch before it is resized
        self.parking: parking.Parking | None = None  # until a slot is parked
        self._keeps = keep and not (record or capacity.penalised) and self._cache.keys() == parking.KEPT

    @property
    def busy(self) -> bool:
        return self._block is not None or bool(self._again) or any(draft is not None for draft in self._drafts)

    def left(self, steps: int = 0) -> int | None:
        """Returns the number of sequences with more than `steps` tokens to draw, as if none stopped earlier; None where a block or
        turns may add others."""
        live = [slot for slot, draft in enumerate(self._drafts) if draft is not None and draft.request.open]
        turns = any(self._drafts[slot].request.conversation for slot in live)  # type: ignore[union-attr]
        if self._block is not None or self._again or self.parking or turns:
            return None
        return int(np.sum(self._slots.limit[live] - self._slots.drawn[live] > steps))

    @property
    def preempted(self) -> bool:
        """Whether sequences that have begun wait, since others needed their pages."""
        return bool(self._again)

    @property
    def read(self) -> bool:
        """Whether the host ends sequences itself, by searching their text."""
        return any(draft is not None and draft.request.settings.stop_strings for draft in self._drafts)

    @property
    def cut(self) -> bool:
        """Whether any sequence is drawn from a part of the distribution."""
        return any(draft is not None and choose.filters(draft.request.settings) for draft in self._drafts)

    def resize(self, slots: int) -> None:
        """Moves the live sequences, in their order, to a batch of `slots` slots."""
        gone = set(self.free())
        live = [slot for slot in range(self.capacity.slots) if slot not in gone]
        source = np.zeros(slots, np.int32)
        source[: len(live)] = live
        self._programs.add(("resize", self.capacity, slots))
        moved = {name: part for name, part in self._cache.items() if self.pages is None or name not in parking.KEPT}
        layout = self.seen.sharding
        moved, self.seen = decode.resized(moved, self.seen, source, policy=self.policy)
        self.seen = jax.device_put(self.seen, layout)  # of a table without entries a compiler may choose another
        self._cache = {**self._cache, **moved}
        if self.pages is not None:
            self.pages.move(live, slots)
        self._age = np.concatenate([self._age[live], np.zeros(slots - len(live), np.int64)])
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
        found = [slot for slot, draft in enumerate(self._drafts) if draft is None and slot not in kept]
        if self.pages is not None:
            for slot in found:
                self.pages.release(slot)
        return found

    @property
    def room(self) -> bool:
        """Whether any slot is free or parked."""
        return bool(self.free() or self.parking)

    def block_shape(self, rows: int, longest: int) -> tuple[int, int]:
        """Returns the rows and tokens, padding included, of a block of `rows` prompts of up to `longest` tokens."""
        length = min(bucket(longest, max(shortest(), self.capacity.page)), self.capacity.length)
        return bucket(rows, self.policy.partitioner.batch_shards), length

    def prefill(self, prefixes: Sequence[Prefix], params: Params, version: int) -> int:
        """Prefills a block of prompts, equal ones once; their sequences take slots at the next `place`.

        Returns the tokens that were prefilled, without padding.
        """
        rows = {bytes_of(prefix): i for i, prefix in reversed(list(enumerate(prefixes)))}
        places = {held: row for row, held in enumerate(sorted(rows, key=rows.__getitem__))}
        first = [prefixes[rows[held]] for held in places]
        drafts = deque[tuple[int, Draft]]()
        for request, index in prefixes:
            drafts.extend((places[bytes_of((request, index))], draft) for draft in request.drafts(index))
        texts = [(request.prefixes[index], request.place) for request, index in first]
        return self._prefill(texts, drafts, params, version)

    def prefill_again(self, params: Params, version: int, most: int) -> int:
        """Prefills a block of sequences whose pages others needed, of up to `most` tokens; returns the tokens, without padding."""
        drafts, longest = deque[tuple[int, Draft]](), 0
        while self._again:
            draft = self._again[0]
            longest = max(longest, len(draft.prefix) + draft.count)
            if drafts and np.prod(self.block_shape(len(drafts) + 1, longest)) > most:
                break
            self._again.popleft()
            if draft.request.open:
                drafts.append((len(drafts), draft))
        texts = [(np.concatenate([draft.prefix, draft.tokens]), draft.request.place) for _, draft in drafts]
        return self._prefill(texts, drafts, params, version) if drafts else 0

    def _prefill(
        self, texts: Sequence[tuple[np.ndarray, int]], drafts: deque[tuple[int, Draft]], params: Params, version: int
    ) -> int:
        """Prefills rows, each with the place of its adapters, for the drafts of each row."""
        tokens = np.full(self.block_shape(len(texts), max(len(text) for text, _ in texts)), NO_TOKEN, np.int32)
        places = np.zeros(len(tokens), np.int32)
        for row, (text, place) in enumerate(texts):
            tokens[row, : len(text)], places[row] = text, place
        cache, routes = self._prefilled(params, tokens, places)
        self._block = Block(cache=cache, tokens=tokens, places=places, version=version, drafts=drafts, routes=routes)
        return int((tokens != NO_TOKEN).sum())

    def place(self, params: Params, version: int) -> bool:
        """Copies sequences of the block into free slots; returns whether some are left."""
        block, free = self._block, self.free()
        if block is None:
            return False
        wanted = sum(draft.request.open for _, draft in block.drafts)
        while len(free) < wanted and self.parking:
            free.append(self._evicted())
        if not free:
            return True
        if block.version != version:  # the prompts' keys and values follow the newest weights
            (block.cache, block.routes), block.version = self._prefilled(params, block.tokens, block.places), version
            self._unshare(block)
        found: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []  # of the block's parts into pages
        while free and block.drafts:
            row, draft = block.drafts[0]
            if draft.request.open:
                if not self._seated(block, row, free, copies):
                    break
                found.append((free[0], row))
                if block.routes is not None and not draft.count:
                    draft.recorded = block.routes, row
                self._assign(free.pop(0), draft)
            block.drafts.popleft()
        self._copy(block, found, copies)
        if not block.drafts:
            self._unshare(block)
            self._block = None
        return self._block is not None

    def _copy(self, block: Block, found: Sequence[tuple[int, int]], copies: Sequence[tuple[int, int]]) -> None:
        """Copies rows of the block into slots, (slot, row), and with pages also parts of them into pages, (page, part)."""
        if not found:
            return
        slots = self.capacity.slots
        size = bucket(len(found), max(slots // _REFILLS, 1)) if decode.refills_apart() else slots
        pairs = padded(found, min(size, slots), slots)
        parts = (
            padded(copies, bucket(len(copies), max(slots // _REFILLS, 1)), self.capacity.pages).T if copies else None
        )
        self._programs.add(
            ("place", self.capacity, block.tokens.shape, len(pairs), 0 if parts is None else parts.shape)
        )
        self._cache, self.seen = decode.place(
            self._cache, self.seen, block.cache, block.tokens, *pairs.T, parts, policy=self.policy
        )

    def _seated(self, block: Block, row: int, free: list[int], copies: list[tuple[int, int]]) -> bool:
        """Puts a free slot in which there is room for a row of the block first, with pages for it; returns whether there is one.

        Adds to `copies` the pages that are to be written, each with the part of the block that it gets.
        """
        if (pages := self.pages) is None:
            return True
        each, length = block.tokens.shape[1] // pages.size, block.length(row)  # parts and tokens of a row
        while True:
            first, live = pages.first(free), ~self._slots.done
            if fitting := [slot for slot in first if pages.fits(slot, row, length, block.shared, live)]:
                best = max(fitting, key=lambda slot: pages.free(pages.shard(slot)))  # of the shard with most room
                free.remove(best)
                free.insert(0, best)
                written, begin = pages.seat(best, row, length, block.shared), row * each
                copies.extend((page, begin + part) for page, part in written)
                return True
            if self.parking:
                free.append(self._evicted())
            elif block.shared and self._slots.done.all():  # else nothing would ever end
                self._unshare(block)
            else:
                return False

    def _unshare(self, block: Block) -> None:
        """Frees the pages that a block holds for sequences to come."""
        if self.pages is not None:
            self.pages.unshare(block.shared)

    def _evicted(self, slot: int | None = None) -> int:
        """Returns a parked slot, or the one that was parked first, which is free then, and its pages too."""
        assert self.parking is not None
        slot = self.parking.evict(slot)
        if self.pages is not None:
            self.pages.release(slot)
        return slot

    def secure(self, steps: int) -> None:
        """Gives each sequence pages for `steps` more tokens; where too few are free, those of parked slots and of the last sequences placed,
        which are prefilled again later."""
        if not self.reserve(steps):
            for slot in np.argsort(self._age, kind="stable").tolist():
                if self._drafts[slot] is not None:
                    self._claim(slot, int(self._entries(steps)[slot]))

    def reserve(self, steps: int) -> bool:
        """Gives each sequence pages for `steps` more tokens, or none where too few are free; returns whether all have them."""
        if self.pages is None:
            return True
        live = np.flatnonzero(~self._slots.done)
        return self.pages.grow(live, self._entries(steps)[live])

    def _entries(self, steps: int) -> np.ndarray:
        """Returns the entries of each slot's sequence after `steps` more tokens, [slots]."""
        at = self._slots
        return at.position + 1 + np.minimum(steps, at.limit - at.drawn)

    def _claim(self, slot: int, entries: int) -> bool:
        """Gives a slot pages for its first entries, and takes them from others where too few are free; returns whether it has them."""
        pages = self.pages
        while pages is not None and not pages.grow([slot], [entries]):
            shard = pages.shard(slot)
            live = [i for i, draft in enumerate(self._drafts) if draft is not None and pages.shard(i) == shard]
            parked = [i for i in self.parking or () if pages.shard(i) == shard]
            if parked:
                self._evicted(parked[0])
            elif live in ([], [slot]) and self._block is not None and self._block.shared:
                self._unshare(self._block)
            elif live:
                last = max(live, key=lambda i: self._age[i])
                draft = self._drafts[last]
                assert draft is not None
                self._release(last)
                pages.release(last)
                self._again.appendleft(draft)
                if last == slot:
                    return False
            else:  # slots that are being resumed have them
                pages.release(slot)
                return False
        return True

    def parked(self, request: Request, version: int) -> int | None:
        """Returns the parked slot in which a turn of a conversation continues; None where the turn is to be prefilled."""
        if self.parking is None or request.conversation is None or request.sequences != 1:
            return None
        return self.parking.find(
            request.conversation.id, np.asarray(request.prefixes[0], np.int32), version, request.place
        )

    def resume(self, turns: Mapping[int, Request], params: Params, most: int) -> tuple[int, int]:
        """Continues in parked slots, {slot: its next turn}, `most` at a time; returns the numbers of kept and of prefilled tokens."""
        assert self.parking is not None  # `parked` found the slots
        held = {slot: len(self.parking.take(slot).tokens) for slot in turns}
        there = {slot: turn for slot, turn in turns.items() if self._claim(slot, len(turn.prefixes[0]))}
        self._again.extend(turn.drafts(0)[0] for slot, turn in turns.items() if slot not in there)
        for begin in range(0, len(there), most):
            self._lengthen(dict(list(there.items())[begin : begin + most]), held, params)
        return sum(held[slot] for slot in there), sum(
            len(turn.prefixes[0]) - held[slot] for slot, turn in there.items()
        )

    def _lengthen(self, turns: Mapping[int, Request], held: Mapping[int, int], params: Params) -> None:
        """Continues in slots that hold so many tokens of their turns."""
        new = [np.asarray(request.prefixes[0][held[slot] :], np.int32) for slot, request in turns.items()]
        width = min(bucket(max(map(len, new)), _TOLD), self.capacity.length)
        tokens = np.zeros((bucket(len(turns), self.policy.partitioner.batch_shards), width), np.int32)
        starts, slots = np.zeros(len(tokens), np.int32), np.full(len(tokens), self.capacity.slots, np.int32)
        places = np.zeros(len(tokens), np.int32)
        for row, (slot, more) in enumerate(zip(turns, new)):
            tokens[row, : len(more)], starts[row], slots[row] = more, held[slot], slot
            places[row] = turns[slot].place
        self._programs.add(("lengthen", self.capacity, tokens.shape))
        table = None
        if self.pages is not None:
            table = np.zeros((len(tokens), self.pages.table.shape[1]), np.int32)
            table[: len(turns)] = self.pages.numbers(list(turns))
        self._cache = parking.lengthen(params, self._cache, tokens, starts, slots, places, table, policy=self.policy)
        for slot, request in turns.items():
            self._assign(slot, request.drafts(0)[0])

    def step(self, served: decode.Served, steps: int, after: decode.Chunk | None = None) -> decode.Chunk:
        """Starts a chunk of decode steps on the device, from the slots' state or from the end of the chunk `after`."""
        cut = self.cut
        self._programs.add(("decode", self.capacity, steps, cut))
        at = self._slots if self.pages is None else self._slots._replace(table=self.pages.table.copy())
        at = decode.on_devices(at, at if after is None else after, self.policy)
        self._cache, self.seen, chunk = decode.decode(
            served, self._cache, self.seen, at, policy=self.policy, steps=steps, cut=cut, record=self._record,
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
        counts = np.maximum(np.sum(tokens != NO_TOKEN, axis=1) - 1, 0).astype(np.int32) if holds else None
        cache, routes = decode.prefill(
            params, np.maximum(tokens, 0), counts, places, policy=self.policy, dtype=self._dtype, record=self._record
        )
        return cache, None if routes is None else Recorded(routes)

    def _assign(self, slot: int, draft: Draft) -> None:
        self._slots.set(slot, draft)
        self._drafts[slot], self._age[slot] = draft, self._placed
        self._placed += 1

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
