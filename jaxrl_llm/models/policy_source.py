"""Where a policy comes from: a Hugging Face folder, or an architecture with random parameters."""

from dataclasses import dataclass
from pathlib import Path

import jax
from jaxtyping import PRNGKeyArray

from jaxrl_llm import hf_weights
from jaxrl_llm.mesh import Partitioner
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Params, Policy


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A model to train or to sample from; exactly one of `architecture` and `pretrained` is set.

    Attributes:
      architecture: sizes of a model with random parameters, or None.
      pretrained: a Hugging Face folder or id ("owner/name" or "owner/name@COMMIT") with config.json and safetensors, or None.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      remat: what the backward pass recomputes, from nothing to each layer: "none", "dots" (all but matrix products),
        "gate" (half of the MLP), "projections" (the MLP), "attention" (all but fused attention), "full", or "offload" (as "full", with the layers'
        inputs kept on the host).
      unroll: layers of one step of the scan over layers; more takes longer to compile and copies less.
      lora: adapters to train in place of the model's own weights; None trains all weights.
    """

    architecture: Architecture | None = None
    pretrained: str | None = None
    compute_dtype: str = "float32"
    remat: str = "none"
    unroll: int = 1
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if (self.architecture is None) == (self.pretrained is None):
            got = "neither" if self.architecture is None else "both"
            raise ValueError(f"PolicySource needs `architecture` or `pretrained` (got {got}): set one of the two")

    def policy(self, partitioner: Partitioner, *, value: bool = False) -> Policy:
        """The policy on a mesh; with `value`, the layers of a value model, which a sequence classifier has too.

        Raises:
          FileNotFoundError, ValueError: the pretrained folder is not there or not of a supported architecture.
        """
        architecture = self.architecture
        if self.pretrained is not None:
            architecture = hf_weights.architecture(hf_weights.locate(self.pretrained), value=value)
        assert architecture is not None  # by __post_init__
        fields = (architecture, partitioner, self.compute_dtype, self.remat)
        if self.lora is not None:
            return AdaptedPolicy(*fields, self.lora, unroll=self.unroll)
        return Policy(*fields, unroll=self.unroll)

    def params(self, policy: Policy, key: PRNGKeyArray) -> Params:
        """What training starts from: the pretrained parameters or adapters, random ones drawn with `key`, or adapters that
        change nothing.

        Raises:
          FileNotFoundError, ValueError: a folder is not there or does not hold what the policy has.
        """
        if isinstance(policy, AdaptedPolicy):
            if policy.lora.pretrained is not None:
                return hf_weights.load_adapters(policy, Path(policy.lora.pretrained).expanduser())
            return policy.init(jax.random.fold_in(key, 1))
        return self._weights(policy, key)

    def base(self, policy: Policy, key: PRNGKeyArray) -> Params | None:
        """The frozen parameters under the adapters, the same for the same `key`; None where all parameters are trained."""
        return policy.frozen(self._weights(policy.plain, key)) if isinstance(policy, AdaptedPolicy) else None

    def _weights(self, policy: Policy, key: PRNGKeyArray) -> Params:
        if self.pretrained is not None:
            return hf_weights.load(policy, hf_weights.locate(self.pretrained))
        return policy.init(key)
