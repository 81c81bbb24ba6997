"""The weights that a running embedded sampler decodes with, and which of their arrays are its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.transformer import Apart
from jaxrl_llm.samplers.embedded.decode import Served, check_shapes, layers_apart
from jaxrl_llm.samplers.embedded.room import room_apart
from jaxrl_llm.samplers.embedded.shelf import Shelf


def deleted(params: Params) -> bool:
    """Returns whether the learner donated a shared buffer since it was published."""
    return any(x.is_deleted() for x in jax.tree.leaves(params))


@dataclass(eq=False, kw_only=True)
class Weights:
    """The served parameters and the adapters loaded beside them.

    Attributes:
      policy: the model.
      serve: converts the learner's parameters to those that decoding reads.
      shelf: the further sets of adapters; they stay from one publication to the next.
      params: the served parameters; None where there are none.
      apart: the parameters of each layer by itself, where a device has room for them.
      own: the arrays of both that are not the learner's.
    """

    policy: Policy
    serve: Callable[[Params], dict[str, Any]]
    shelf: Shelf
    params: dict[str, Any] | None = field(default=None, init=False)
    apart: Apart | None = field(default=None, init=False)
    own: list[jax.Array] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._splits: bool | None = None  # whether there is room for `apart`; known from the first publication on

    @property
    def served(self) -> Served:
        """What decoding reads; there are parameters."""
        assert self.params is not None
        return Served(self.params, self.apart)

    def publish(self, params: Params) -> None:
        """Takes the place of the version before, whose own arrays are deleted before new ones are made.

        Raises:
          ValueError: where `params` are not those of the policy; the version before stays served.
        """
        check_shapes(self.policy, params)
        self.free()
        new = self.shelf.beside(self.serve(params))
        if self._splits is None:
            self._splits = room_apart(self.policy, new)
        self._take(new, jax.tree.leaves(params))

    def load(self, name: str, adapters: Params) -> None:
        """Serves a further set of adapters as `name`; raises ValueError as `Shelf.add` does."""
        self.shelf.add(name, adapters)
        if self.params is not None and not deleted(self.params):
            own = {id(array) for array in self.own}
            shared = [array for array in jax.tree.leaves(self.params) if id(array) not in own]
            self._take(self.shelf.put(self.params, name), shared)

    def free(self) -> None:
        """Frees what is served."""
        self.params = self.apart = None
        for array in self.own:
            array.delete()
        self.own = []

    def _take(self, new: dict[str, Any], shared: list[Any]) -> None:
        others = {id(array) for array in shared}
        self.params, self.apart = new, layers_apart(new, policy=self.policy) if self._splits else None
        self.own = [array for array in jax.tree.leaves(new) if id(array) not in others]
        self.own.extend(jax.tree.leaves(self.apart))
