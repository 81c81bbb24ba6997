"""The base classes of preference losses, which find the two answers of a pair by `MicroBatch.group` and `MicroBatch.side`.

A loss sees, for each pair, the preferred (w) and the rejected (l) answer's summed log-probs under the policy and the
reference and their token counts. It is summed over the pairs of a micro-batch and divided by the global number of
pairs; both answers of a pair are in one micro-batch. Each group holds one pair; a pair with one answer missing or
invalid is left out whole.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term, given
from jaxrl_llm.algorithms.masked import sequence_sum
from jaxrl_llm.algorithms.objective import Objective
from jaxrl_llm.protocols import Learns


class Answers(NamedTuple):
    """One side of the pairs of a micro-batch; entries that belong to no pair are finite and unused.

    Attributes:
      logprob: float32 [S] summed over the answer's tokens; carries the gradient.
      reference: float32 [S] the same under the reference policy; 0 where the loss needs none.
      tokens: float32 [S] number of the answer's tokens.
    """

    logprob: Array
    reference: Array
    tokens: Array

    @property
    def mean(self) -> Array:
        """The log-prob per token, float32 [S]."""
        return self.logprob / jnp.maximum(self.tokens, 1.0)

    @property
    def log_ratio(self) -> Array:
        """The summed log-prob less the reference's, float32 [S]."""
        return self.logprob - self.reference


def rejected_of(group: Int[Array, " S"], side: Int[Array, " S"], present: Bool[Array, " S"]) -> Float[Array, "S S"]:
    """Returns a matrix [S, S] that is 1 where column j is the rejected answer to row i's preferred one."""
    pair = (group[:, None] == group[None, :]) & (side[:, None] == 1) & (side[None, :] == -1)
    return (pair & present[:, None] & present[None, :]).astype(jnp.float32)


def complete_pairs(sequences: Sequences) -> tuple[Bool[Array, "S T"], Float[Array, ""]]:
    """Returns the learned tokens of pairs that have both answers, and the number of pairs that lack one."""
    halves = [
        jax.ops.segment_sum(
            (sequences.counted & (sequences.side == side)).astype(jnp.int32), sequences.group, sequences.groups
        )
        for side in (1, -1)
    ]
    complete = (halves[0] == 1) & (halves[1] == 1)
    mask = sequences.learned & (complete[sequences.group] & (sequences.side != 0))[:, None]
    return mask, jnp.sum((halves[0] + halves[1] > 0) & ~complete).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Preference(Objective):
    """The base class of preference losses.

    Attributes:
      beta: scale of the implicit reward, which is beta x the log-prob or the log-ratio.
      answers_of: "data" learns from the pairs of a dataset, "policy" from the policy's own samples, which `Stage.pairing` prefers
        and rejects.
    """

    beta: float = 0.1
    answers_of: Literal["data", "policy"] = "data"
    refers: ClassVar[bool] = True  # whether the loss has a reference policy

    def __post_init__(self) -> None:
        components.choices(self)
        components.above(self, 0, "beta")

    @property
    def learns_from(self) -> Learns:
        return "pairs" if self.answers_of == "data" else "samples"

    @property
    def needs(self) -> frozenset[str]:
        sides = {"sides"} if self.answers_of == "policy" else set()
        return frozenset(sides | ({"reference"} if self.refers else set()))

    @property
    def group_size_at_least(self) -> int:
        return 2

    def answers(self, outputs: Mapping[str, Any], batch: MicroBatch) -> Answers:
        """Sums the log-probs of each answer of a micro-batch, [S] each."""
        total = lambda x: sequence_sum(x, batch.sequence, batch.mask, batch.sequences)  # noqa: E731
        logprob = outputs["policy"]["logprob"]
        reference = jnp.zeros_like(logprob)
        if self.refers:
            reference = given(batch.ref_logprobs, "reference")
        return Answers(total(logprob), total(reference), total(jnp.ones_like(logprob)))


@dataclass(frozen=True, kw_only=True)
class Pairwise(Preference):
    """A preference loss of pairs; a subclass implements `pair_loss`."""

    @abstractmethod
    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        """Returns the loss [S] of each pair."""

    def margin(self, chosen: Answers, rejected: Answers) -> Array:
        """Returns the implicit reward of the preferred answer less that of the rejected one, [S]."""
        return self.beta * (chosen.log_ratio - rejected.log_ratio)

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns 1 to all tokens of complete pairs."""
        loss_mask, dropped = complete_pairs(sequences)
        return Advantages(
            advantages=loss_mask.astype(jnp.float32), loss_mask=loss_mask, metrics={"pairs/incomplete": dropped}
        )

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        chosen = self.answers(outputs, batch)
        pairing = rejected_of(batch.group, batch.side, chosen.tokens > 0)
        rejected = Answers(*(jnp.dot(pairing, x, precision=jax.lax.Precision.HIGHEST) for x in chosen))
        paired = jnp.any(pairing > 0, axis=1)
        # Where there is no pair the loss is taken of zeros, which keeps its gradient finite.
        chosen, rejected = (Answers(*(jnp.where(paired, x, 0.0) for x in side)) for side in (chosen, rejected))
        term = (jnp.sum(jnp.where(paired, self.pair_loss(chosen, rejected), 0.0)), "pairs")
        margin = self.margin(chosen, rejected)
        measured = {
            "pairs/accuracy": margin > 0,
            "pairs/margin": margin,
            "pairs/chosen_logprob": chosen.mean,
            "pairs/rejected_logprob": rejected.mean,
        }
        metrics = {name: (jnp.sum(jnp.where(paired, x, 0.0)), "pairs") for name, x in measured.items()}
        return {"policy": term}, {"loss/policy": term, **metrics}
