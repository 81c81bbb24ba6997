"""The fixed shapes of a batch of slots, and the counters of what it does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrl_llm.kernels.decode_attention import cache as caches
from jaxrl_llm.samplers.requests import Request

_SHORTEST = 16  # tokens of the shortest bucket: shorter ones would compile more programs and save nothing
_STOP_IDS = 4  # fewest stop ids that a batch has room for


def shortest() -> int:
    """Returns the shortest cache of a slot, in tokens."""
    return max(_SHORTEST, caches.page())


def bucket(size: int, unit: int = 1) -> int:
    """Returns the smallest unit x 2^k that holds `size`."""
    return unit << max(0, -(-size // unit) - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The fixed shapes of a batch.

    Attributes:
      slots: sequences at a time.
      length: tokens of a slot's cache.
      stop_ids: stop ids of a slot.
      penalised: whether seen tokens are recorded, for a repetition penalty.
      page: entries of a page of which slots take as many as they fill; 0 where each has its own `length` entries.
      pages: number of pages of all shards; 0 where there are none.
    """

    slots: int
    length: int
    stop_ids: int
    penalised: bool
    page: int = 0
    pages: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request], *, max_slots: int, shards: int, page: int = 0) -> "Capacity":
        """Returns the smallest buckets that hold `requests`; rows fill the mesh's batch shards.

        With pages of `page` entries, there are as many as all slots may fill, and one of each shard's that is nobody's.
        """
        asked = sum(request.sequences for request in requests)
        slots = bucket(max(asked, *(request.at_once for request in requests)), shards)
        length = bucket(max(request.length for request in requests), shortest())
        longest, unit = max(request.max_length for request in requests), page or caches.page()
        slots = min(slots, -(-max_slots // shards) * shards)
        length = min(bucket(length, unit), -(-longest // unit) * unit)
        return cls(
            slots=slots,
            length=length,
            stop_ids=bucket(max(len(request.settings.stop_token_ids) for request in requests), _STOP_IDS),
            penalised=any(request.settings.repetition_penalty != 1 for request in requests),
            page=page,
            pages=slots * (length // page) + shards if page else 0,
        )

    def stretched(self, other: "Capacity") -> "Capacity":
        """Returns these slots with the length of another capacity, and with its table of seen tokens."""
        pages = self.pages + (self.slots * (other.length - self.length) // self.page if self.page else 0)
        return replace(self, length=other.length, penalised=other.penalised, pages=pages)

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
