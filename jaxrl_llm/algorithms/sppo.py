"""SPPO: self-play, in which an answer's log-ratio is regressed to how often it wins against the policy's own answers.

    L = (h - (P - 1/2) / beta)^2,  h = log pi - log ref of an answer,  P = the probability that it beats the reference policy

https://arxiv.org/abs/2405.00675, equation 4.7 (eta is 1 / beta here, and the reference is the policy of the iteration before).
`SPPO` estimates P among the samples of a prompt by their rewards. `SPPOHard` learns from pairs, whose P is 1 and 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences, Term
from jaxrl_llm.algorithms.masked import masked_mean, sequence_mean
from jaxrl_llm.algorithms.preference import Answers, Pairwise, Preference

Wins = Literal["greater", "bradley-terry"]


def win_rates(
    reward: Float[Array, " S"], group: Int[Array, " S"], counted: Bool[Array, " S"], wins: Wins
) -> Float[Array, " S"]:
    """Returns, at each sample, the mean probability that it beats a counted sample of its prompt, itself among them, [S].

    "greater": 1 where its reward is greater, 1/2 where it is equal; "bradley-terry": the sigmoid of the rewards' difference.
    """
    difference = jnp.where(counted, reward, 0.0)[:, None] - jnp.where(counted, reward, 0.0)[None, :]
    beats = 0.5 * (1.0 + jnp.sign(difference)) if wins == "greater" else jax.nn.sigmoid(difference)
    others = (group[:, None] == group[None, :]) & counted[None, :]
    return jnp.where(counted, masked_mean(beats, others, axis=1), 0.5)


@dataclass(frozen=True, kw_only=True)
class SPPO(Preference):
    """Self-play preference optimisation of all samples of a prompt.

    Attributes:
      wins: how rewards become probabilities that a sample beats another: "greater" or "bradley-terry".
    """

    beta: float = 1e-3
    answers_of: Literal["data", "policy"] = "policy"
    wins: Wins = "greater"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answers_of != "policy":
            components.refuse(self, "answers_of", "'policy'; sppo.SPPOHard learns from the pairs of a dataset")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"})

    def advantages(self, sequences: Sequences) -> Advantages:
        """Assigns P - 1/2 to all tokens of each sample."""
        learned = sequences.learned
        won = win_rates(sequences.reward, sequences.group, sequences.counted, self.wins)
        return Advantages(
            advantages=jnp.where(learned, won[:, None] - 0.5, 0.0),
            loss_mask=learned,
            metrics={"reward/mean": masked_mean(sequences.reward, sequences.counted)},
        )

    def loss(self, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[dict[str, Term], dict[str, Term]]:
        answers = self.answers(outputs, batch)
        won = sequence_mean(jnp.where(batch.mask, batch.advantages, 0.0), batch.sequence, batch.mask, batch.sequences)
        present = answers.tokens > 0
        error = jnp.where(present, answers.log_ratio - won / self.beta, 0.0)
        term = (jnp.sum(jnp.square(error)), "sequences")
        right = present & (won * answers.log_ratio > 0)
        return {"policy": term}, {
            "loss/policy": term,
            "sppo/accuracy": (jnp.sum(jnp.where(right, 1.0, 0.0)), "sequences"),
        }


@dataclass(frozen=True, kw_only=True)
class SPPOHard(Pairwise):
    """Self-play preference optimisation of pairs."""

    def pair_loss(self, chosen: Answers, rejected: Answers) -> Array:
        goal = 0.5 / self.beta
        return jnp.square(chosen.log_ratio - goal) + jnp.square(rejected.log_ratio + goal)
