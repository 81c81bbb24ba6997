"""Rewards minus the policy's mean entropy on some sources, and minus its divergence from the reference on others.

    R = -(1 / |y|) sum_t H_t  on `sources`,   R = -(1 / |y|) sum_t (log pi(y_t) - log pi_ref(y_t))  on `kl_sources`

This is TokenBuncher's reward (https://arxiv.org/abs/2508.20697); its code uses only the first form, on all rows. Entropies and
log-probs are the learner's, in nats a token. With coefficient 1 and a maximum of 3 it is the bonus of the attack that the
paper calls adaptive, which tries to raise the entropy again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import numpy as np

from jaxrl_llm.experience import Rollout, Scores


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Computes a reward from the learner's token stats of a response.

    Attributes:
      coefficient: weight of the mean entropy.
      maximum: cap on the entropy in nats; None for no cap.
      sources: names of sources, or patterns such as "*", that are rewarded by the entropy.
      kl_sources: the same for sources that are rewarded by minus the divergence from the reference; they take precedence.
    """

    needs_stats: ClassVar[bool] = True

    coefficient: float = -1.0
    maximum: float | None = None
    sources: Sequence[str] = ("*",)
    kl_sources: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.coefficient == 0 or (self.maximum is not None and not self.maximum > 0):
            raise ValueError(
                f"entropy.Entropy needs coefficient other than 0 and maximum > 0, or None (got {self.coefficient} and {self.maximum})"
            )

    @property
    def needs(self) -> frozenset[str]:
        """{"reference"}, the stage's frozen initial policy, where `kl_sources` is set."""
        return frozenset({"reference"} if self.kl_sources else ())

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "entropy" [G] in the source's form; a response without tokens scores 0.

        Raises:
          ValueError: neither list names the source, or the run does not provide the token stats.
        """
        source = rollouts[0].prompt.source if rollouts else ""
        named = lambda patterns: any(fnmatchcase(source, pattern) for pattern in patterns)  # noqa: E731
        if named(self.kl_sources):
            values = _of(stats, "ref_logprobs") - _of(stats, "old_logprobs")
        elif named(self.sources):
            values = self.coefficient * np.minimum(
                _of(stats, "entropy"), np.inf if self.maximum is None else self.maximum
            )
        else:
            raise ValueError(
                f"no rule for the source {source!r}: entropy.Entropy.sources has {list(self.sources)}, kl_sources {list(self.kl_sources)}"
            )
        values = np.asarray(values, np.float64)
        return Scores(parts={"entropy": values}, valid={"entropy": np.isfinite(values)})


def _of(stats: Mapping[str, np.ndarray] | None, name: str) -> np.ndarray:
    if stats is None or name not in stats:
        raise ValueError(
            f"entropy.Entropy needs the learner's {name}: give it as the reward of a stage, on top, and not of an evaluation"
        )
    return stats[name]
