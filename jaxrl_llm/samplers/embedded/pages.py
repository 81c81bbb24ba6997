"""The pages of a batch of slots, as the host keeps them: which slot has which, and which are free.

Keys and values lie in a pool of pages (`kernels.decode_attention.cache`), and a slot has pages for the entries that it has filled or may
fill in the chunk to come, so that a batch has as many slots as its sequences' lengths allow, whatever the longest one may need. The whole
pages of a prompt before its last token are held once for all its samples on a shard of the batch. Page 0 of each shard is nobody's: slots
that have ended write there.
"""

import numpy as np

from jaxrl_llm.samplers.embedded.room import Capacity

NOBODYS = 0
# {(row of a block of prompts, shard): the pages that its samples there share}
Shared = dict[tuple[int, int], list[int]]


class Pages:
    """The pages of each slot; slots are divided evenly among the shards, and have pages of their own shard.

    Attributes:
      size: entries of a page.
      table: int32 [slots, N], the numbers of each slot's pages in its shard; NOBODYS where it has none.
    """

    def __init__(self, slots: int, length: int, size: int, pages: int, shards: int = 1):
        """Creates free pages.

        Args:
          slots: number of slots.
          length: most entries of a slot, a multiple of `size`.
          size: entries of a page.
          pages: number of pages of all shards, nobody's included.
          shards: number of shards of the batch.
        """
        self.size, self._shards, self._each = size, shards, pages // shards
        self.table = np.full((slots, length // size), NOBODYS, np.int32)
        self._count = np.zeros(slots, np.int64)  # of each slot's pages
        self._users = np.zeros((shards, self._each), np.int64)
        self._free = [list(range(self._each - 1, NOBODYS, -1)) for _ in range(shards)]

    @classmethod
    def of(cls, capacity: Capacity, shards: int) -> "Pages":
        """Returns the free pages of a batch."""
        return cls(capacity.slots, capacity.length, capacity.page, capacity.pages, shards)

    def shard(self, slot: int) -> int:
        """Returns the shard of a slot."""
        return slot * self._shards // len(self.table)

    def first(self, slots: list[int]) -> list[int]:
        """Returns the first of the slots of each shard."""
        if self._shards == 1:
            return slots[:1]
        return list({self.shard(slot): slot for slot in reversed(slots)}.values())

    def free(self, shard: int) -> int:
        """Returns the number of free pages of a shard."""
        return len(self._free[shard])

    def needed(self, entries: int) -> int:
        """Returns the number of pages that hold so many entries of a slot, at most all of its table."""
        return min(-(-entries // self.size), self.table.shape[1])

    def whole(self, length: int) -> int:
        """Returns the number of whole pages of a prompt's entries before its last token, which are the same for all of its samples."""
        return (length - 1) // self.size

    def grow(self, slots: list[int] | np.ndarray, entries: list[int] | np.ndarray) -> bool:
        """Gives each slot pages for its first entries; returns False, and gives none, where too few are free."""
        own, wanted = np.asarray(slots), np.minimum(-(-np.asarray(entries) // self.size), self.table.shape[1])
        more, shards = np.maximum(wanted - self._count[own], 0), own * self._shards // len(self.table)
        asked = [int(more[shards == shard].sum()) for shard in range(self._shards)]
        if any(count > self.free(shard) for shard, count in enumerate(asked)):
            return False
        for shard, count in enumerate(asked):
            mine, each = own[shards == shard], more[shards == shard]
            place = np.arange(count) - np.repeat(np.cumsum(each) - each, each)  # among the new pages of its slot
            rows = np.repeat(mine, each)
            self.table[rows, self._count[rows] + place] = self._take(shard, count)
        self._count[own] += more
        return True

    def fits(self, slot: int, row: int, length: int, shared: Shared, live: np.ndarray) -> bool:
        """Returns whether there are pages for a prompt of `length` tokens in a slot, and one more for each `live` slot of its shard."""
        shard = self.shard(slot)
        held = self.whole(length) if (row, shard) in shared else 0
        others = int(np.sum(np.array_split(live, self._shards)[shard]))
        return self.needed(length + self.size) - held + others <= self.free(shard)

    def seat(self, slot: int, row: int, length: int, shared: Shared) -> list[tuple[int, int]]:
        """Gives a free slot, for which `fits` is true, the pages of a prompt.

        Returns those that are to be written, (their number among those of all shards, the number of the prompt's page).
        """
        shard, whole = self.shard(slot), self.whole(length)
        written: list[int] = []
        if (row, shard) not in shared:
            shared[row, shard], written = self._take(shard, whole), list(range(whole))
        numbers = shared[row, shard]
        self._users[shard, numbers] += 1
        self.table[slot, :whole], self._count[slot] = numbers, whole
        self.grow([slot], [length])
        each = shard * self._each
        return [(each + int(self.table[slot, part]), part) for part in [*written, whole]]

    def unshare(self, shared: Shared) -> None:
        """Frees the pages of prompts that only samples to come would share."""
        for (_, shard), numbers in shared.items():
            self._drop(shard, numbers)
        shared.clear()

    def _take(self, shard: int, count: int) -> list[int]:
        """Returns the numbers of `count` free pages of a shard, which have one user then."""
        free = self._free[shard]
        found = [free.pop() for _ in range(count)]
        self._users[shard, found] = 1
        return found

    def _drop(self, shard: int, numbers: list[int]) -> None:
        """Takes a user from pages of a shard; those without any are free."""
        self._users[shard, numbers] -= 1
        self._free[shard].extend(number for number in numbers if not self._users[shard, number])

    def release(self, slot: int) -> None:
        """Takes a slot's pages from it."""
        if count := self._count[slot]:
            self._drop(self.shard(slot), self.table[slot, :count].tolist())
            self.table[slot], self._count[slot] = NOBODYS, 0

    def move(self, live: list[int], slots: int) -> None:
        """Moves the pages of `live` slots, in their order, to the first of `slots` slots; there is one shard, and others have none."""
        assert self._shards == 1
        table, count = np.full((slots, self.table.shape[1]), NOBODYS, np.int32), np.zeros(slots, np.int64)
        table[: len(live)], count[: len(live)] = self.table[live], self._count[live]
        self.table, self._count = table, count

    def numbers(self, slots: list[int]) -> np.ndarray:
        """Returns the tables of slots, int32 [R, N], with the pages' numbers among those of all shards."""
        shards = np.array([self.shard(slot) for slot in slots], np.int32)
        return self.table[slots] + shards[:, None] * np.int32(self._each)
