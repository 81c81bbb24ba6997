"""Everything on the device that an update changes, and what a checkpoint saves of it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

Array = Any  # a jax.Array; in a tree that describes the state, a shape or a sharding


@partial(jax.tree_util.register_dataclass, data_fields=["step", "skipped", "params", "moments"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The policy and the models trained beside it, with their optimizer states; frozen models live apart.

    Attributes:
      step: int32 [] updates applied or skipped so far.
      skipped: int32 [] updates in a row whose gradient was not finite.
      params: {model name: parameters}, "policy" and, where an algorithm asks for one, "critic" or "reward_model".
      moments: {model name: optimizer state} of the trained models.
    """

    step: Array
    skipped: Array
    params: dict[str, Any]
    moments: dict[str, Any]

    @property
    def policy(self) -> Any:
        return self.params["policy"]
