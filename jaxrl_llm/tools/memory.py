"""Computes the peak memory of a stage on one device from the programs that XLA compiles for it; no array is allocated.

A program's own account is its arguments, its outputs that reuse no argument, and its temporaries. In addition there is live memory that
is not an argument: the moments while a gradient is computed, the reference and the sampler's weights throughout. The account leaves out
the allocator's fragmentation and the libraries' workspaces, which are small.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.learner import example, offload
from jaxrl_llm.learner.learner import NO_BASES, Bases, Learner
from jaxrl_llm.learner.optimizer import rested
from jaxrl_llm.learner.score import TEACHER
from jaxrl_llm.models.architecture import PRECISE
from jaxrl_llm.models.linear import Quantized
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded import decode, narrow
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.train.build import learner_of
from jaxrl_llm.train.describe import block_of, capacity_of
from jaxrl_llm.train.frozen_models import reference_shapes
from jaxrl_llm.train.stage import Stage


def size(tree: Any) -> int:
    """Returns the bytes on one device of a tree of shapes with shardings; host memory does not count."""
    return sum(offload.bytes_of(x) for x in jax.tree.leaves(tree) if x.sharding.memory_kind != offload.HOST)


class NoAccount(RuntimeError):
    """Raised where the backend does not report a compiled program's memory."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """The memory that one program needs on a device, in bytes.

    Attributes:
      resident: arrays that are alive at the same time but are not its arguments.
      arguments: its arguments.
      outputs: its outputs that do not reuse an argument's memory.
      temporary: its temporaries while it runs.
      most: the compiler's own peak of all these together, where they are not all alive at once; None takes their sum.
      seconds: seconds that compiling took.
      program: the compiled program, or None where the account is of a part of a program.
    """

    resident: int = 0
    arguments: int
    outputs: int
    temporary: int
    most: int | None = None
    seconds: float = field(default=0.0, compare=False)
    program: jax.stages.Compiled | None = field(default=None, compare=False, repr=False)

    @property
    def peak(self) -> int:
        own = self.arguments + self.outputs + self.temporary if self.most is None else self.most
        return self.resident + own


def account(program: jax.stages.Lowered, resident: int = 0) -> Account:
    """Compiles a program and reads its memory account.

    Raises:
      NoAccount: the backend reports no account.
    """
    start = time.perf_counter()
    compiled = program.compile()
    seconds, found = time.perf_counter() - start, compiled.memory_analysis()
    if found is None:
        raise NoAccount(
            f"the backend {jax.default_backend()!r} gives no account of a compiled program's memory (memory_analysis() is None)"
        )
    return Account(
        resident=resident,
        arguments=found.argument_size_in_bytes,
        outputs=max(found.output_size_in_bytes - found.alias_size_in_bytes, 0),
        temporary=found.temp_size_in_bytes,
        # TPU's temporaries are those of all its memories.
        most=found.peak_memory_in_bytes if dispatch.device().platform == "tpu" else None,
        seconds=seconds,
        program=compiled,
    )


def streaming(params: Mapping[str, Any], moments: Any, gradient: Any) -> int:
    """Returns the peak bytes of gradients, and of moments brought to the device, while an offloaded optimizer works (`offload.streamed`)."""
    slopes = [size(offload.pruned(gradient, paths)) for paths in offload.groups(params)]
    return max(sum(slopes[i:]) + sum(visit) for i, visit in enumerate(offload.visits(params, moments)))


def visiting(learner: Learner) -> int:
    """Returns the peak bytes of gradients, and of moments brought to the device, while the optimizers of a learner work; 0 where none is offloaded."""
    state, gradients = learner.abstract, learner.gradients
    away = [n for n, optimizer in learner.optimizers.items() if optimizer.offload]
    if not away:
        return 0
    waiting = [size([gradients[other] for other in away[i + 1 :]]) for i in range(len(away))]
    most = max(streaming(state.params[n], state.moments[n], gradients[n]) + w for n, w in zip(away, waiting))
    return most + size([gradient for n, gradient in gradients.items() if n not in away])


def resting(learner: Learner) -> Any:
    """Returns the shapes of the moments that stay on the device. Devices that are not attached do not tell their memories apart."""
    return {n: moments for n, moments in learner.abstract.moments.items() if not learner.optimizers[n].offload}


def of_learner(learner: Learner, batch: MicroBatch, microbatches: int, bases: Bases = NO_BASES) -> dict[str, Account]:
    """Returns accounts of an update's programs with `microbatches` micro-batches, or of scoring with 0.

    The whole training state is alive in each.
    """
    state, moments = learner.abstract, size(resting(learner))
    programs = learner.lowered(batch, microbatches, bases)
    found = {n: account(p, 0 if n in ("whole", "apply") else moments) for n, p in programs.items()}
    if microbatches and (held := visiting(learner)):
        found["apply"] = Account(resident=moments, arguments=size(state.params), outputs=0, temporary=held)
    return found


def of_sampling(policy: Policy, sampler: EmbeddedSampler, stage: Stage, max_length: int) -> tuple[int, Account]:
    """Returns the bytes of the sampler's weights, where they are a copy, and the account of a decode chunk including its cache."""
    served, plain = served_shapes(policy, sampler), policy.plain
    capacity = capacity_of(sampler, stage, max_length, policy.partitioner.batch_shards)
    shape = capacity.slots, capacity.length, sampler.decode_chunk, sampler.cache, sampler.page
    program = decode.lowered(plain, served, *shape)
    return copy(policy, sampler, stage), account(program)


def copy(policy: Policy, sampler: EmbeddedSampler, stage: Stage) -> int:
    """Returns the bytes of the sampler's weights where they are a copy; weights that the learner stores in the compute dtype are shared."""
    dtype, share = policy.compute_dtype, sampler.share_weights
    if sampler.weights is not None:
        narrower = lambda x: isinstance(x, Quantized)  # noqa: E731
        leaves = jax.tree.leaves(served_shapes(policy, sampler), is_leaf=narrower)
        shared = share and dtype == stage.optimizer.weights_dtype
        return size([x for x in leaves if narrower(x) or not shared])
    if not apart(policy, sampler):
        return 0 if share and dtype == stage.optimizer.weights_dtype else size(cast(policy.plain, dtype))
    base = 0 if share and dtype == policy.lora.base_dtype else size(cast(policy.plain, dtype))
    return base + (0 if share and dtype == "float32" else size(cast(policy, dtype)))


def apart(policy: Policy, sampler: EmbeddedSampler) -> TypeGuard[AdaptedPolicy]:
    """Returns whether the sampler serves adapters beside their base instead of the sum."""
    return sampler.adapters and isinstance(policy, AdaptedPolicy)


def served_shapes(policy: Policy, sampler: EmbeddedSampler) -> Any:
    """Returns the shapes of the weights that the sampler decodes with."""
    base = cast(policy.plain, policy.compute_dtype)
    if sampler.weights is not None:
        return narrow.shapes(policy.plain, base, sampler.weights)
    return policy.joined(cast(policy, policy.compute_dtype), base) if apart(policy, sampler) else base


def of_prefill(policy: Policy, sampler: EmbeddedSampler, stage: Stage, max_length: int) -> Account:
    """Returns the account of the prefill of a block of the longest prompts."""
    capacity = capacity_of(sampler, stage, max_length, policy.partitioner.batch_shards)
    block, served = block_of(policy, sampler, stage, capacity), served_shapes(policy, sampler)
    return account(decode.prefill.lower(served, block, policy=policy.plain, dtype=sampler.cache))


def frozen(learner: Learner) -> Bases:
    """Returns shapes of the frozen weights of models with adapters, and of the teacher that an update reads."""
    bases: dict[str, Any] = {}
    for name, model in learner.models.items():
        policy = getattr(model, "backbone", model)
        if isinstance(policy, AdaptedPolicy):
            bases[name] = cast(policy.plain, policy.lora.base_dtype)
    return bases if learner.teacher is None else {**bases, TEACHER: learner.teacher.abstract()}


def cast(policy: Policy, dtype: str) -> Any:
    """Returns shapes of the parameters in another dtype; norms' scales and routers stay in float32."""

    def leaf(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if path[-1].key in PRECISE else jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, policy.abstract())


def state(stage: Stage, policy: Policy) -> dict[str, int]:
    """Returns the bytes of a stage's state on one device, by kind."""
    learner = learner_of(stage, policy, 0)
    gradients = learner.gradients
    if not (example.summed(stage) or stage.optimizer.offload):  # then gradients are never stored in float32
        gradients = {n: rested(tree, learner.optimizers[n].slopes_dtype) for n, tree in gradients.items()}
    trees = {
        "weights": learner.abstract.params, "gradients": gradients,
        "moments": resting(learner), "frozen base": frozen(learner),
    }  # fmt: skip
    found = {name: size(tree) for name, tree in trees.items()} | {"reference": reference(stage, policy)}
    return {name: held for name, held in found.items() if held}


def reference(stage: Stage, policy: Policy) -> int:
    """Returns the bytes of the reference on one device, where the stage keeps it there."""
    held = "reference" in stage.needs and not stage.offload_reference
    return size(reference_of(stage, policy)) if held else 0


def reference_of(stage: Stage, policy: Policy) -> Any:
    """Returns the shapes of the stage's reference, in the dtype in which it is kept."""
    return reference_shapes(policy, stage.reference_dtype or policy.compute_dtype)
