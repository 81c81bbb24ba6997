"""The models beside the policy that a stage's rewards ask, started, and given its weights.

A companion that follows the policy holds a copy of its weights, of the stage's begin or of a later step. The copies are
part of a checkpoint, so that a run goes on with the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Companion, Params


@dataclass(kw_only=True, eq=False)
class Companions:
    """The companions of a stage.

    Attributes:
      members: all of them, started.
      policy: whose weights those that follow hold.
      base: what lies frozen under the policy's adapters, or None.
    """

    members: Sequence[Companion]
    policy: Policy
    base: Params | None = None
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def following(self) -> dict[str, Companion]:
        """Those that hold weights of the policy, by the names of their copies."""
        return {f"companion_{i}": member for i, member in enumerate(self.members) if member.follows}

    @property
    def abstract(self) -> dict[str, Any]:
        """The shapes of the copies, to restore a checkpoint into."""
        return {name: self.policy.abstract() for name in self.following}

    def begin(self, params: Params) -> dict[str, Params]:
        """The copies that a stage begins with."""
        return {name: jax.tree.map(jnp.copy, params) for name in self.following}

    async def refresh(self, copies: dict[str, Params], params: Params, steps: int) -> None:
        """Gives each its weights where it does not hold them; renews the copies that are due after `steps` steps."""
        for name, member in self.following.items():
            due = steps > 0 and member.refresh_every > 0 and steps % member.refresh_every == 0
            if due:
                copies[name] = jax.tree.map(jnp.copy, params)
            if due or name not in self._held:
                self._held[name] = steps
                await member.publish(self.policy.merged(copies[name], self.base), steps)
