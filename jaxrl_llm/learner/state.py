"""The state of training: parameters and moments of the models that learn, and the count of updates."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

Leaf = Any  # a jax.Array; in a tree that describes the state, a shape or a sharding


@partial(jax.tree_util.register_dataclass, data_fields=["step", "skipped", "params", "moments"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The policy and the models trained beside it, with their optimizer states; frozen models are kept elsewhere.

    Attributes:
      step: int32 [] updates applied or skipped so far.
      skipped: int32 [] updates in a row whose gradient was not finite.
      params: {model name: parameters}, "policy" and, where the algorithm needs one, "critic" or "reward_model".
      moments: {model name: optimizer state} of the trained models.
    """

    step: Leaf
    skipped: Leaf
    params: dict[str, Any]
    moments: dict[str, Any]

    @property
    def policy(self) -> Any:
        return self.params["policy"]
