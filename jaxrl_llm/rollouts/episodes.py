"""The settings of rollouts that environments and agents play."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm import components
from jaxrl_llm.experience import Limits


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """How the rollouts of an environment or an agent are played.

    Attributes:
      limits: the limits of one rollout. What follows its first prompt also stays within SamplingParams.max_tokens, all of it within this and
        Stage.max_prompt_tokens together, and its turns within Stage.max_turns.
      concurrency: most rollouts in progress.
      extra: rollouts started for each group beyond its size; the first valid ones to end are used, which favours short ones.
      tries: most times that a rollout is played until it does not fail, each time anew with the same seed.
      stop_after: rollouts in a row that failed, beyond as many as are in progress, after which the run ends with the last one's error.
      late: what happens to a rollout that Limits.episode_s ends: "length" keeps and scores it, "aborted" makes it invalid.
      close_s: most seconds that closing an environment may take.
      weights: {name: weight of the environment's or agent's reward of this name}; 1 for others.
      history: what a chat template does to earlier turns: "keep" leaves them as sampled, "template" renders them anew, as a new branch.
      gateway: where agents reach the policy, an agents.gateway.Gateway; None listens on this machine alone.
    """

    limits: Limits = field(default_factory=Limits)
    concurrency: int = 256
    extra: int = 0
    tries: int = 1
    stop_after: int = 64
    late: Literal["length", "aborted"] = "length"
    close_s: float = 10.0
    weights: Mapping[str, float] = field(default_factory=dict)
    history: Literal["keep", "template"] = "keep"
    gateway: Any = None

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 1, "concurrency", "tries", "stop_after")
        components.at_least(self, 0, "extra")
        components.above(self, 0, "close_s")
