"""Sources of models: a Hugging Face folder or random parameters for a policy; its own backbone or the policy's for a value model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.value import HEAD, ValueModel
from jaxrl_llm.protocols import Params


@dataclass(kw_only=True, eq=False)
class Opened:
    """A model to be evaluated; its weights are read when `params` is called.

    Attributes:
      policy: the model on the mesh.
      tokenizer: its tokenizer.
      params: reads the parameters.
      name: the path or id from which it was opened, and the checkpoint's step.
    """

    policy: Any
    tokenizer: Any
    params: Callable[[], Params]
    name: str


@runtime_checkable
class ModelSource(Protocol):
    """Opens a model to be evaluated."""

    def open(self, partitioner: Partitioner) -> Opened: ...


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A model to train or to sample from; exactly one of `architecture` and `pretrained` is set.

    Attributes:
      architecture: sizes of a model with random parameters, or None.
      pretrained: a Hugging Face folder or id ("owner/name" or "owner/name@COMMIT") with config.json and safetensors, or None.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      remat: activations that the backward pass recomputes, from none to whole layers: "none", "dots" (all but matrix products),
        "gate" (half of the MLP), "projections" (the MLP), "attention" (all but fused attention), "full", or "offload" (as "full",
        with the layers' inputs kept on the host).
      unroll: number of layers in one step of the scan over layers; more layers take longer to compile and copy less.
      lora: adapters to train in place of the model's own weights; None trains all weights.
      bitwise: True makes the embedded sampler's log-prob of each token the learner's, bit for bit, at the price of slower products
        (docs/explanation/bitwise.md); for dense models, without adapters, on a mesh of data and fsdp: CPUs, or Hopper GPUs with compute_dtype
        "bfloat16". Value models do not need it.
      choice_bias: whether each expert of the model has a bias in its choice (architecture.Experts.choice_bias), which is 0 where a
        pretrained model's folder has none.
      slow_kernels: True allows kernels that make a run more than twice as slow as other kernels of the device would, as float32
        does with long rows on a GPU; False refuses such a run, and says which setting makes it fast.
    """

    architecture: Architecture | None = None
    pretrained: str | None = None
    compute_dtype: str = "float32"
    remat: str = "none"
    unroll: int = 1
    lora: LoRA | None = None
    bitwise: bool = False
    choice_bias: bool = False
    slow_kernels: bool = False

    def __post_init__(self) -> None:
        if (self.architecture is None) == (self.pretrained is None):
            got = "neither" if self.architecture is None else "both"
            raise ValueError(f"PolicySource needs `architecture` or `pretrained` (got {got}): set one of the two")

    def policy(self, partitioner: Partitioner, *, value: bool = False) -> Policy:
        """Returns the policy on a mesh; with `value`, the layers of a value model, which may come from a sequence classifier.

        Raises:
          FileNotFoundError, ValueError: the pretrained folder is absent or its architecture is unsupported.
        """
        architecture = self.architecture
        if self.pretrained is not None:
            architecture = hf_weights.architecture(hf_weights.locate(self.pretrained), value=value)
        assert architecture is not None  # by __post_init__
        if self.choice_bias:
            if architecture.experts is None:
                raise ValueError("sources.PolicySource.choice_bias is for a model with experts: set it to False")
            architecture = replace(architecture, experts=replace(architecture.experts, choice_bias=True))
        fields = (architecture, partitioner, self.compute_dtype, self.remat)
        bitwise = self.bitwise and not value
        if self.lora is not None:
            if bitwise:
                raise ValueError(
                    "the bitwise mode is not for adapters (sources.PolicySource.lora), which the learner multiplies by themselves and the "
                    "sampler adds to the weights: set BITWISE = False, or train all weights"
                )
            return AdaptedPolicy(*fields, self.lora, unroll=self.unroll)
        return Policy(*fields, unroll=self.unroll, bitwise=bitwise)

    def params(self, policy: Policy, key: PRNGKeyArray) -> Params:
        """Returns the initial parameters: the pretrained parameters or adapters, random parameters drawn with `key`, or adapters
        that change nothing.

        Raises:
          FileNotFoundError, ValueError: a folder is absent or does not hold the policy's parameters.
        """
        if isinstance(policy, AdaptedPolicy):
            if policy.lora.pretrained is not None:
                return hf_weights.load_adapters(policy, Path(policy.lora.pretrained).expanduser())
            return policy.init(jax.random.fold_in(key, 1))
        return self._weights(policy, key)

    def base(self, policy: Policy, key: PRNGKeyArray) -> Params | None:
        """Returns the frozen parameters under the adapters, the same for the same `key`; None where all parameters are trained."""
        return policy.frozen(self._weights(policy.plain, key)) if isinstance(policy, AdaptedPolicy) else None

    def _weights(self, policy: Policy, key: PRNGKeyArray) -> Params:
        if self.pretrained is None:
            return policy.init(key)
        folder, experts = hf_weights.locate(self.pretrained), policy.architecture.experts
        if experts is None or not experts.choice_bias or hf_weights.config_of(folder).get("choice_bias", False):
            return hf_weights.load(policy, folder)
        unbiased = replace(policy.architecture, experts=replace(experts, choice_bias=False))
        params = hf_weights.load(replace(policy, architecture=unbiased), folder)
        for stack, sparse in zip(policy.architecture.stacks, policy.architecture.sparse):
            if sparse:
                shape = policy.abstract()[stack]["mlp"]["choice_bias"]
                params[stack]["mlp"]["choice_bias"] = jax.device_put(jnp.zeros(shape.shape), shape.sharding)
        return params


@dataclass(frozen=True, kw_only=True)
class ValueSource:
    """A critic or a reward model; its head starts at 0, or as in a sequence classifier's folder.

    Attributes:
      backbone: the layers, from a Hugging Face folder (a language model or a sequence classifier with one label) or random;
        None copies the policy's when the stage begins.
      bias: whether the head has a bias, which a Hugging Face folder cannot hold.
    """

    backbone: PolicySource | None = None
    bias: bool = False

    def model(self, policy: Policy) -> ValueModel:
        """Returns the value model, with the layers of `policy` or with its own on the same mesh.

        Raises:
          FileNotFoundError, ValueError: the backbone's folder is absent or its architecture is unsupported.
        """
        return self.on(policy.partitioner) if self.backbone is not None else ValueModel.like(policy.plain, self.bias)

    def on(self, partitioner: Partitioner) -> ValueModel:
        """Returns the value model on a mesh, with its own backbone; raises the errors of `model`."""
        if self.backbone is None:
            raise ValueError("a value model without a policy needs sources.ValueSource.backbone: set it")
        return ValueModel.like(self.backbone.policy(partitioner, value=True), self.bias)

    def base(self, model: ValueModel, key: PRNGKeyArray) -> Params | None:
        """Returns the frozen layers under the adapters; None where all parameters are trained."""
        return None if self.backbone is None else self.backbone.base(model.backbone, key)

    def params(self, model: ValueModel, policy: Params, key: PRNGKeyArray) -> Params:
        """Returns the initial parameters.

        Args:
          model: the value model, as returned by `model`.
          policy: the policy's parameters with adapters merged; they are copied where there is no own backbone.
          key: key of random layers.
        """
        if self.backbone is not None:
            return {**self.backbone.params(model.backbone, key), HEAD: self._head(model)}
        layers = {name: policy[name] for name in model.backbone.abstract()}
        copied = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), layers)
        return {**copied, HEAD: model.head()}

    def _head(self, model: ValueModel) -> Params:
        """Returns the head of the backbone's folder where that is a sequence classifier, else a head at 0."""
        assert self.backbone is not None
        if self.backbone.pretrained is None or not hf_weights.is_classifier(
            hf_weights.locate(self.backbone.pretrained)
        ):
            return model.head()
        kernel = {HEAD: {"kernel": model.abstract()[HEAD]["kernel"]}}
        return model.head() | hf_weights.read(kernel, hf_weights.locate(self.backbone.pretrained))[HEAD]
