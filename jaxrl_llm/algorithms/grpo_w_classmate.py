"""GRPO with a classmate: the tokens of the thought are credited with all rewards, the others with their own alone.

    A_t = g(r_main + r_classmate)  where t is in the thought,  g(r_main) elsewhere
    g(r) = r - mean_G r, divided by std_G r + 1e-6 with `std`

The "grpo_w_classmate" of github.com/Lorenayannnnn/classmate-cot-verl. The parts' sum enters the advantage, so that it has
a gradient wherever no clip is active (the seed's vanilla_classmate loss multiplies the classmate's advantage by a ratio
that does not depend on the policy). Without `std` it is gdpo with normalize = "none" and the same span.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import bounds
from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.clipped import Clipped
from jaxrl_llm.algorithms.group_relative import Grouped
from jaxrl_llm.algorithms.policy_gradient import Estimate
from jaxrl_llm.batch import View


@dataclass(frozen=True, kw_only=True)
class GRPOWithClassmate(Grouped, Clipped):
    """GRPO whose further rewards credit one span alone.

    Attributes:
      span: token range that all rewards credit.
      main_parts: names of the parts that credit all tokens, with weight 1.
      std: divide by the group's standard deviation (n - 1).
    """

    span: str = "thought"
    main_parts: tuple[str, ...] = ("main",)
    std: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.main_parts:
            bounds.refuse(self, "main_parts", "the names of one or more parts of the reward")
        if self.kl_coef > 0 and self.kl_in == "reward":
            bounds.refuse(self, "kl_in", "'loss': the divergence is no part of the reward")

    def estimate(self, view: View, rewards: Array) -> Estimate:
        if self.span not in view.spans:
            raise ValueError(
                f"grpo_w_classmate.GRPOWithClassmate.span must be one of {sorted(view.spans)}, which rollouts have "
                f"(got {self.span!r}): set stages.Stage.marker"
            )
        if unknown := set(self.main_parts) - set(view.parts):
            raise ValueError(
                f"grpo_w_classmate.GRPOWithClassmate.main_parts must be among the reward's parts {sorted(view.parts)} "
                f"(got {sorted(unknown)})"
            )
        main = sum((view.parts[name] for name in self.main_parts), start=jnp.zeros_like(view.reward))
        whole, own = self._relative(jnp.sum(rewards, axis=1), view), self._relative(main, view)
        return Estimate(jnp.where(view.spans[self.span], whole, own))

    def _relative(self, reward: Array, view: View) -> Array:
        """g(r) at every learned token."""
        reward = jnp.where(view.counted, reward, 0.0)
        stats = advantages.group_statistics(reward, view.group, view.counted, view.groups)
        credit = advantages.group_relative(reward, stats, std=self.std, singleton=self.singleton)
        return advantages.to_tokens(credit, view.learned)
