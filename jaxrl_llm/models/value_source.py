"""Where a value model comes from: the policy itself, or a backbone of its own."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm import hf_weights
from jaxrl_llm.mesh import Partitioner
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.policy_source import PolicySource
from jaxrl_llm.models.value import HEAD, ValueModel


@dataclass(frozen=True, kw_only=True)
class ValueSource:
    """A critic or a reward model; its head begins at 0, or as a sequence classifier's folder has it.

    Attributes:
      backbone: the layers, of a Hugging Face folder (a language model or a sequence classifier with one label) or random;
        None copies the policy's as its stage begins.
      bias: whether the head has a bias, which a Hugging Face folder cannot hold.
    """

    backbone: PolicySource | None = None
    bias: bool = False

    def model(self, policy: Policy) -> ValueModel:
        """The value model, with the layers of `policy` or on its mesh.

        Raises:
          FileNotFoundError, ValueError: the backbone's folder is not there or not of a supported architecture.
        """
        return self.on(policy.partitioner) if self.backbone is not None else ValueModel.like(policy.plain, self.bias)

    def on(self, partitioner: Partitioner) -> ValueModel:
        """The value model on a mesh, with a backbone of its own; raises as `model` does."""
        if self.backbone is None:
            raise ValueError("a value model without a policy needs value_source.ValueSource.backbone: set it")
        return ValueModel.like(self.backbone.policy(partitioner, value=True), self.bias)

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
            return {**self.backbone.params(model.backbone, key), HEAD: self._head(model)}
        layers = {name: policy[name] for name in model.backbone.abstract()}
        copied = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), layers)
        return {**copied, HEAD: model.head()}

    def _head(self, model: ValueModel) -> Params:
        """The head of the backbone's folder where that is a sequence classifier, else one at 0."""
        assert self.backbone is not None
        if self.backbone.pretrained is None or not hf_weights.is_classifier(
            hf_weights.locate(self.backbone.pretrained)
        ):
            return model.head()
        kernel = {HEAD: {"kernel": model.abstract()[HEAD]["kernel"]}}
        return model.head() | hf_weights.read(kernel, hf_weights.locate(self.backbone.pretrained))[HEAD]
