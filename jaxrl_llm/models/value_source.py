"""Where a value model comes from: the policy itself, or a backbone of its own."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.policy_source import PolicySource
from jaxrl_llm.models.value import HEAD, ValueModel


@dataclass(frozen=True, kw_only=True)
class ValueSource:
    """A critic or a reward model to train; its head begins at 0.

    Attributes:
      backbone: the layers, of a Hugging Face folder or random; None copies the policy's as its stage begins.
      bias: whether the head has a bias, which a Hugging Face folder cannot hold.
    """

    backbone: PolicySource | None = None
    bias: bool = False

    def model(self, policy: Policy) -> ValueModel:
        """The value model on the mesh of `policy`.

        Raises:
          FileNotFoundError, ValueError: the backbone's folder is not there or not of a supported architecture.
        """
        layers = policy.plain if self.backbone is None else self.backbone.policy(policy.partitioner)
        return ValueModel.like(layers, self.bias)

    def base(self, model: ValueModel, key: PRNGKeyArray) -> Params | None:
        """The frozen layers under the adapters; None where all parameters are trained."""
        return None if self.backbone is None else self.backbone.base(model.backbone, key)

    def params(self, model: ValueModel, policy: Params, key: PRNGKeyArray) -> Params:
        """The parameters that training starts from.

        Args:
          model: as `model` gave it.
          policy: the policy's parameters, adapters merged; copied where there is no backbone of its own.
          key: draws random layers.
        """
        if self.backbone is not None:
            return {**self.backbone.params(model.backbone, key), HEAD: model.head()}
        layers = {name: policy[name] for name in model.backbone.abstract()}
        copied = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), layers)
        return {**copied, HEAD: model.head()}
