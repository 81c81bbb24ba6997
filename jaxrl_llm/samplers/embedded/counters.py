"""Counters of the embedded sampler's work since the last call of `metrics`."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Counters:
    """Tokens, slot-steps of decoding, and seconds of work."""

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
