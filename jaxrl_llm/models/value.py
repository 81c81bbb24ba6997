"""A value model (critic or reward model): a policy's layers with a linear head to one number a token, v_t = w . h_t + b."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.policy import Params, Policy

HEAD = "value"


@dataclass(frozen=True)
class ValueModel:
    """Values of tokens on a mesh; holds no arrays, like a Policy.

    Its Params are the backbone's plus {"value": {"kernel": [D], "bias": []}}.

    Attributes:
      backbone: the layers, without a head to the vocabulary.
      bias: whether the head has a bias.
    """

    backbone: Policy
    bias: bool = False

    @classmethod
    def like(cls, policy: Policy, bias: bool = False) -> "ValueModel":
        """Returns the value model with the layers of `policy`."""
        # A tied architecture has no separate head to the vocabulary.
        return cls(replace(policy, architecture=replace(policy.architecture, tied=True), bitwise=False), bias)

    @property
    def partitioner(self) -> Partitioner:
        return self.backbone.partitioner

    @property
    def architecture(self) -> Architecture:
        return self.backbone.architecture

    def axes(self) -> dict[str, Any]:
        """Returns the logical axes of each parameter."""
        head: dict[str, Any] = {"kernel": (None,)} | ({"bias": ()} if self.bias else {})
        return {**self.backbone.axes(), HEAD: head}

    def sizes(self) -> dict[str, Any]:
        """Returns shape and dtype of each parameter, regardless of the mesh; see `Policy.sizes`."""
        return {**self.backbone.sizes(), HEAD: jax.eval_shape(self._head)}

    def abstract(self) -> dict[str, Any]:
        """Returns shape, dtype and sharding of each parameter as it is stored."""
        replicated = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.partitioner.replicated)  # noqa: E731
        return {**self.backbone.abstract(), HEAD: jax.tree.map(replicated, jax.eval_shape(self._head))}

    def head(self) -> Params:
        """Returns a head that gives every token the value 0."""
        return jax.device_put(self._head(), self.partitioner.replicated)

    def init(self, key: PRNGKeyArray) -> Params:
        """Returns random layers, and a head that gives every token the value 0."""
        return {**self.backbone.init(key), HEAD: self.head()}

    @property
    def plain(self) -> "ValueModel":
        """The same model with all its parameters in one tree; see `Policy.plain`."""
        return replace(self, backbone=self.backbone.plain)

    def merged(self, params: Params, base: Params | None) -> Params:
        """Returns the parameters of `plain`; see `Policy.merged`."""
        return {**self.backbone.merged(_layers(params), base), HEAD: params[HEAD]}

    def joined(self, params: Params, base: Params | None) -> Params:
        """Joins trained and frozen parameters to the tree that `values` takes; see `Policy.joined`."""
        return {**self.backbone.joined(_layers(params), base), HEAD: params[HEAD]}

    def values(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        *,
        max_segments: int | None = None,
    ) -> Float[Array, "B T"]:
        """Returns float32 values, in units of reward, of the prefix that ends at each token of the packed rows; see `Policy.hidden`."""
        hidden = self.backbone.hidden(_layers(params), tokens, positions, segments, max_segments=max_segments)
        head = params[HEAD]
        values = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"], precision="highest")
        return values + head["bias"] if self.bias else values

    def _head(self) -> Params:
        kernel = jnp.zeros(self.architecture.width, jnp.float32)
        return {"kernel": kernel} | ({"bias": jnp.zeros((), jnp.float32)} if self.bias else {})


def _layers(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name != HEAD}
