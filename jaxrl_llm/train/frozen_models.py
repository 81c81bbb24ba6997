"""Frozen models, which a stage uses but does not train: its reference, its teacher, and the auxiliary models of rewards.

A model that follows the policy holds a copy of its weights, made at the stage's beginning or after a later step. A reference that
never changes is stored once in the run folder; the other copies are part of each checkpoint. A resumed run has the same ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.components import parts
from jaxrl_llm.distributed import tree_sums
from jaxrl_llm.distributed.tree_sums import Sizes
from jaxrl_llm.learner import offload
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.score import TEACHER, Teacher
from jaxrl_llm.models.architecture import PRECISE
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Params
from jaxrl_llm.train.stage import Stage

REFERENCE = "reference"


def reference_shapes(policy: Policy, dtype: str) -> Params:
    """Returns shapes and shardings of a reference of the policy's weights in `dtype`.

    Norms' scales and routers stay float32, as the layers use them, and so do adapters, which are small.
    """
    if policy is not policy.plain:
        return policy.abstract()

    def shape(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if path[-1].key in PRECISE else jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree_util.tree_map_with_path(shape, policy.abstract())


@runtime_checkable
class AuxiliaryModel(Protocol):
    """A model that a reward uses beside the policy; a run starts the auxiliary models that it finds in the fields of its rewards.

    Attributes:
      follows: True where it holds weights of the policy.
      refresh_every: number of steps after which it gets the policy's weights anew; 0 keeps those that the stage began with.
    """

    @property
    def follows(self) -> bool: ...

    @property
    def refresh_every(self) -> int: ...

    def start(self, policy: Any, tokenizer: Any, run_dir: Path) -> None:
        """Prepares the model beside `policy`, before its first use; `run_dir` is a folder for this model alone."""

    async def publish(self, params: Params, version: int) -> None:
        """Holds `params`, the policy's parameters, from now on."""

    async def stop(self) -> None:
        """Frees the model's memory and processes."""


@dataclass(kw_only=True, eq=False)
class FrozenModels:
    """The frozen models of a stage.

    Attributes:
      policy: the run's policy.
      base: frozen parameters under the policy's adapters, or None.
      refers: whether the stage needs the reference policy.
      every: number of steps after which the reference takes the policy's weights anew; None for never.
      offloads: whether the reference stays in host memory, and moves to the device while a step is scored.
      dtype: element type of the reference's weights; norms' scales, routers and adapters stay float32.
      teacher: scores what the policy samples, where the algorithm needs it.
      auxiliary: the auxiliary models of rewards, started.
      params: {"reference": parameters, "companion_0": the first auxiliary model's copy, where it follows the policy, ...}.
    """

    policy: Policy
    base: Params | None = None
    refers: bool = False
    every: int | None = None
    offloads: bool = False
    dtype: str = "float32"
    teacher: Teacher | None = None
    auxiliary: Sequence[AuxiliaryModel] = ()
    params: dict[str, Params] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def following(self) -> dict[str, AuxiliaryModel]:
        """The auxiliary models that hold weights of the policy, by the names of their copies."""
        return {f"companion_{i}": model for i, model in enumerate(self.auxiliary) if model.follows}

    @property
    def lasting(self) -> bool:
        """Whether there is a reference that never changes."""
        return self.refers and self.every is None

    @property
    def reference(self) -> Params | None:
        """The reference policy's parameters on the device; a transfer to it may still be under way."""
        return offload.to_device(self.params[REFERENCE]) if REFERENCE in self.params else None

    @property
    def score(self) -> bool:
        """Whether the reference or the teacher adds token stats to a batch."""
        return REFERENCE in self.params or self.teacher is not None

    @property
    def abstract(self) -> dict[str, Any]:
        """The shapes and shardings of the copies that each checkpoint holds."""
        renewed = {REFERENCE: self.reference_of(self.dtype)} if self.refers and not self.lasting else {}
        return renewed | {name: self.policy.abstract() for name in self.following}

    @property
    def saved(self) -> dict[str, Params]:
        """The copies that each checkpoint holds: all but a lasting reference."""
        return {name: copy for name, copy in self.params.items() if name != REFERENCE or not self.lasting}

    def reference_of(self, dtype: str) -> Params:
        """Returns shapes and shardings of a stored reference of `dtype`."""
        shapes = reference_shapes(self.policy, dtype)
        return offload.shapes_on_host(shapes) if self.offloads else shapes

    def begin(self, params: Params) -> None:
        """Copies the policy's parameters at the beginning of a stage."""
        if self.refers:
            self.refer(params, shared=True)
        self.params |= {name: self._copied(params) for name in self.following}

    def refer(self, params: Params, *, shared: bool = False) -> None:
        """Takes parameters as the reference, in its dtype and memory; those that are `shared` with the learner are copied."""

        def kept(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
            if x.dtype != shape.dtype:
                x = offload.to_device(x).astype(shape.dtype)
            elif shared and not self.offloads:
                x = jnp.copy(x)
            return offload.to_host(x) if self.offloads else x

        self.params[REFERENCE] = jax.tree.map(kept, params, reference_shapes(self.policy, self.dtype))

    def _copied(self, params: Params) -> Params:
        """Copies the policy's parameters in the dtypes of `abstract`, whatever dtype they are trained in."""
        return jax.tree.map(lambda x, like: jnp.copy(x).astype(like.dtype), params, self.policy.abstract())

    async def refresh(self, params: Params, steps: int) -> None:
        """Gives the reference and the auxiliary models the weights that are due after `steps` steps of the stage."""
        if self.refers and self.every is not None and steps > 0 and steps % self.every == 0:
            self.refer(params, shared=True)
        for name, model in self.following.items():
            due = steps > 0 and model.refresh_every > 0 and steps % model.refresh_every == 0
            if due:
                self.params[name] = self._copied(params)
            if due or name not in self._held:
                self._held[name] = steps
                await model.publish(self.policy.merged(self.params[name], self.base), steps)


def own_sizes(learner: Learner, abstract: Mapping[str, Any]) -> Sizes:
    """Returns the own shapes of arrays that a mesh stores padded: those that each checkpoint holds, as in `abstract`, and the reference."""
    policy, copies = learner.policy, [name for name in (*abstract, REFERENCE) if name != "state"]
    stored = {"state": abstract["state"], **dict.fromkeys(copies, policy.abstract())}
    return tree_sums.filled_up(stored, {"state": learner.sizes, **dict.fromkeys(copies, policy.sizes())})


def base_sizes(learner: Learner, bases: Mapping[str, Params]) -> dict[str, float]:
    """Returns the mean |weight| of frozen parameters under adapters, and of a teacher's, without a mesh's padding."""
    found = {}
    for name, base in bases.items():
        model: Any = learner.teacher if name == TEACHER else learner.models[name]
        own = jax.tree.leaves(getattr(model, "backbone", model).plain.sizes())
        means = [jnp.mean(jnp.abs(x)) * (x.size / n.size) for x, n in zip(jax.tree.leaves(base), own, strict=True)]
        found[name] = float(np.mean(means))
    return found


def auxiliary_models(config: Stage, trainer: Any) -> list[AuxiliaryModel]:
    """Starts the auxiliary models of the rewards of a stage; raises ValueError where the run has several processes."""
    asked = config.samples or any(e.reward is None for e in config.evaluations)
    rewards = [config.reward if asked else None, *(e.reward for e in config.evaluations)]
    models = list(parts(rewards, AuxiliaryModel))
    if models and trainer.processes.count > 1:
        raise ValueError(
            f"a reward of stage {config.name!r} asks a model beside the policy ({type(models[0]).__name__}), and its run has "
            f"{trainer.processes.count} processes: run it on one host, or give REWARD a service"
        )
    for i, model in enumerate(models):
        model.start(trainer.policy.plain, trainer.tokenizer, trainer.run_dir / f"{config.name}_companion_{i}")
    trainer.auxiliary.extend(models)
    return models
