"""Describes a run before it starts, by its kernels, dtypes, sampler and verifiers, and refuses kernels that are much too slow.

The kernels are those that the run's own programs choose: each stage's scoring pass and the embedded sampler's prefill and
decoding are traced with the run's shapes, which computes nothing. Where a kernel falls back to a backend although the
device has a better one for another dtype or row length, its cost is estimated:

    slowdown = (rest + slow) / (rest + part)

`part` is the kernel's time for a token of an update, or for a step of decoding, on its better backend, `slow` on the other, and `rest` that
of all else, by the rates of metrics/flops.py: data sheets, and shares of them that are measured.

Attention in plain JAX keeps its scores, float32, in memory, since a product's result and its operands lie there. They are passed over FORWARD = 5
times: the first product writes them, the maximum reads them, the exponentials read and write them, the second product reads them. The
gradient passes over them BACKWARD = 9 times: two products write the scores and their weights' gradient, the softmax reads both and writes two,
three products read these. `reference` makes the scores of all pairs of a row, `blocked` those that are seen. On one H200 plain JAX made 49
TFLOP/s of 4,096 tokens forward where cuDNN made 412, 8.4 times as many; counted this way it is 8.1 times.

Decode attention in plain JAX indexes the layer's cache, which reads and writes it, and then reads the copy: COPIES = 3 passes in place of one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed import padding, tree_sums
from jaxrl_llm.distributed.mesh import STORED, whole_share
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.dispatch import Choice
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.metrics import flops
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Isolating
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.room import Capacity, bucket
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.requests import Request
from jaxrl_llm.train.build import learner_of
from jaxrl_llm.train.stage import Stage

_log = logging.getLogger(__name__)

FORWARD, BACKWARD, COPIES = 5, 9, 3
SCORE_BYTES = 4
MOST_SLOWDOWN = 2.0
TPU_LANES = 128


def describe(run: Any, policy: Policy) -> list[str]:
    """Returns lines that name the backend of every kernel, the dtype of every part, the sampler, the verifiers' isolation, and what fsdp divides.

    Raises:
      ValueError: a kernel makes the run more than MOST_SLOWDOWN times as slow as another that the device has, and
        sources.PolicySource.slow_kernels is False; the message names the setting that corrects it.
    """
    found = chosen(run, policy)
    if not getattr(run.policy, "slow_kernels", False):
        for choice in found:
            _check(choice, run, policy)
    return [
        f"kernels      {chosen_by(found)} on {dispatch.device().device_kind}",
        f"dtypes       {', '.join(_dtypes(run, policy))}",
        f"sampling     {_sampling(run.sampler)}",
        f"verifiers    {'; '.join(_verifiers(run.stages))}",
        *_division(policy),
    ]


def announce(lines: Sequence[str], *, main: bool = True) -> None:
    """Prints a description on the `main` process, and writes it to the run's log."""
    for line in lines:
        if main:
            print(line, flush=True)
        _log.info("%s", " ".join(line.split()))


# -- kernels -----------------------------------------------------------------------------------------------------------


def chosen(run: Any, policy: Policy) -> list[Choice]:
    """Returns the choice of each kernel in the programs of the run, which are traced and not compiled."""
    traced: set[Any] = set()
    with dispatch.recording() as found:
        for stage in run.stages:
            learner = learner_of(stage, policy, 0)
            shape = (
                stage.packing.rows,
                stage.packing.row_tokens,
                learner.max_segments,
                learner.wanted,
                *learner.models,
            )
            if shape in traced:
                continue
            traced.add(shape)
            bases = {
                name: backbone.plain.abstract()
                for name, model in learner.models.items()
                if isinstance(backbone := getattr(model, "backbone", model), AdaptedPolicy)
            }
            jax.eval_shape(learner.score, learner.abstract.params, _micro_batch(stage), bases)
        for stage in (s for s in run.stages if s.samples and isinstance(run.sampler, EmbeddedSampler)):
            _trace_sampling(policy.plain, run.sampler, stage, run.max_length)
    return found


def _micro_batch(stage: Stage) -> MicroBatch:
    """Returns a micro-batch of the stage as shapes, with its tokens alone."""
    shape = (stage.packing.rows, stage.packing.row_tokens)
    whole, number = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    each = jax.ShapeDtypeStruct((1,), jnp.int32)
    return MicroBatch(
        tokens=whole, targets=whole, positions=whole, segments=whole, sequence=whole,
        mask=jax.ShapeDtypeStruct(shape, jnp.bool_), sampler_logprobs=number, old_logprobs=number, advantages=number,
        ref_logprobs=None, old_values=None, returns=None, weights=None, aux={}, group=each, side=each, counts={},
    )  # fmt: skip


def capacity_of(sampler: EmbeddedSampler, stage: Stage, max_length: int, shards: int) -> Capacity:
    """Returns the slots that a step of the stage needs, at the longest prompts and responses."""
    request = Request(
        prefixes=[np.zeros(stage.max_prompt_tokens, np.int32)] * stage.prompts_per_step, n=stage.group_size,
        settings=stage.settings, seeds=[0] * stage.prompts_per_step, max_length=max_length,
    )  # fmt: skip
    return Capacity.of([request], max_slots=sampler.slots, shards=shards, page=sampler.page)


def block_of(policy: Policy, sampler: EmbeddedSampler, stage: Stage, capacity: Capacity) -> jax.ShapeDtypeStruct:
    """Returns the shape of the tokens of a block of the longest prompts, as they are prefilled together."""
    length = min(bucket(stage.max_prompt_tokens, capacity.page or 1), capacity.length)
    rows = min(max(sampler.prefill_tokens // length, 1), stage.prompts_per_step)
    return jax.ShapeDtypeStruct((bucket(rows, policy.partitioner.batch_shards), length), jnp.int32)


def _trace_sampling(policy: Policy, sampler: EmbeddedSampler, stage: Stage, max_length: int) -> None:
    """Traces the prefill of a block of the longest prompts, and a chunk of decoding."""
    capacity = capacity_of(sampler, stage, max_length, policy.partitioner.batch_shards)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, policy.compute_dtype), policy.abstract())
    block = block_of(policy, sampler, stage, capacity)
    jax.eval_shape(partial(decode.prefill, policy=policy, dtype=sampler.cache), params, block)
    run = partial(decode.decode, policy=policy, steps=sampler.decode_chunk, cut=False)
    held = decode.shapes(policy, capacity.slots, capacity.length, sampler.cache, sampler.page)
    jax.eval_shape(run, decode.Served(params), *held)


def better(choice: Choice) -> str | None:
    """Returns the backend that the device has for the call in bfloat16 and, on TPUs, in rows of whole lanes; None where it is used."""
    changes: dict[str, Any] = {"dtype": "bfloat16"} if hasattr(choice.call, "dtype") else {}
    if choice.op == "attention" and choice.call.platform == "tpu" and choice.call.max_segments is not None:
        changes |= dict.fromkeys(("queries", "keys"), choice.call.queries + -choice.call.queries % TPU_LANES)
    call = replace(choice.call, **changes)
    backends = import_module(f"jaxrl_llm.kernels.{choice.op}.api").BACKENDS
    best: str = next(name for name in backends if dispatch.supports(choice.op, name, call))
    return None if best == choice.backend or best not in choice.refused else best


def slowdown(choice: Choice, run: Any, policy: Policy) -> float:
    """Returns how many times as long the choice makes the program that it is part of, by the module's estimate."""
    if choice.op == "attention" and choice.call.max_segments is not None:
        rest, part, slow = _attention_times(choice, run, policy)
    elif choice.op == "decode_attention":
        size, width = policy.architecture, jnp.dtype(choice.call.dtype).itemsize
        slots = min(run.sampler.slots, max(s.sequences for s in run.stages if s.samples))
        entries = len(flops.attending(size)) * slots * choice.call.length * size.kv_heads * size.head_width
        part = 2.0 * entries * jnp.dtype(choice.call.cache_dtype).itemsize
        rest = float(width * (flops.product_weights(size) + size.vocabulary_size * size.width))
        slow = COPIES * part
    else:
        return 1.0
    return (rest + max(slow, part)) / (rest + part)


def _attention_times(choice: Choice, run: Any, policy: Policy) -> tuple[float, float, float]:
    """Returns times of a token of an update, in FLOPs at the peak rate: of all but attention, of attention by its better backend and by `choice`."""
    size, rates, queries = policy.architecture, flops.RATES, choice.call.queries
    longest = max(min(s.max_prompt_tokens + s.settings.max_tokens, queries) for s in run.stages)
    seen = sum(flops.attention_pairs(longest, window) / longest for window in flops.attending(size))
    rest = 6.0 * flops.product_weights(size) / rates["products"]
    rest += 8.0 * size.vocabulary_size * size.width / rates["logprob update"]
    forward = 4.0 * size.heads * size.head_width * seen
    part = forward * (1 / rates["attention"] + 2.5 / rates["attention backward"])
    scores = size.heads * (len(flops.attending(size)) * queries if choice.backend == "reference" else seen)
    moved = (FORWARD + BACKWARD) * SCORE_BYTES * scores
    return rest, part, moved * flops.intensity(dispatch.device().device_kind) / rates["memory"]


def _check(choice: Choice, run: Any, policy: Policy) -> None:
    best = better(choice)
    if best is None or (times := slowdown(choice, run, policy)) <= MOST_SLOWDOWN:
        return
    raise ValueError(
        f"{choice.op} would run as {choice.backend!r}, about {times:.1f} times as slow a step as with {best!r}, which cannot take "
        f"the call: {choice.refused[best]}. Do that, shorten the rows, or let the run be slow by "
        "sources.PolicySource.slow_kernels = True"
    )


def chosen_by(found: Sequence[Choice]) -> str:
    """Names each kernel with the backends that its calls take, and why not a better one."""
    lines = []
    for op in dict.fromkeys(choice.op for choice in found):
        used = {}
        for choice in found:
            if choice.op == op:
                best = better(choice)
                used[choice.backend] = f"{choice.backend}" + (f" (not {best}: {choice.refused[best]})" if best else "")
        lines.append(f"{op} {' and '.join(used.values())}")
    return ", ".join(lines)


# -- memory ------------------------------------------------------------------------------------------------------------


def _division(policy: Policy) -> Iterator[str]:
    ways = policy.partitioner.axis_sizes[STORED]
    if ways > 1:
        stored, own = policy.plain.abstract(), policy.plain.sizes()
        whole, times = whole_share(stored)
        zeros = (
            f", filled up with {padding.share(stored, own):.2%} of zeros" if tree_sums.filled_up(stored, own) else ""
        )
        yield f"sharding     fsdp {ways} divides all parameters but {whole:.2%}{zeros}; a device holds {times:.2f} times its share"
    for axis, slices in policy.partitioner.across_slices.items():
        yield (
            f"slices       warning: {axis} reaches over {slices} slices, so their hosts' network carries the exchanges of every layer: set "
            f"train.MeshConfig.data = {slices}, and the sizes of the other axes to those of one slice"
        )


# -- the rest ----------------------------------------------------------------------------------------------------------


def _dtypes(run: Any, policy: Policy) -> Iterator[str]:
    optimizers = [
        o for s in run.stages for o in (s.optimizer, s.critic_optimizer if "critic" in s.value_models else None) if o
    ]
    yield " or ".join(dict.fromkeys(_held(o) for o in optimizers))
    if isinstance(policy, AdaptedPolicy):
        yield f"frozen base {policy.lora.base_dtype}"
    yield f"compute {policy.compute_dtype}"
    held = {s.reference_dtype or policy.compute_dtype for s in run.stages if "reference" in s.needs}
    if held and policy is policy.plain:
        yield "reference " + " or ".join(sorted(held))
    kinds = {(s.optimizer.moments_dtype, s.optimizer.second_moment_dtype) for s in run.stages}
    yield "moments " + " or ".join(" and ".join(dict.fromkeys(kind)) for kind in sorted(kinds))
    if isinstance(run.sampler, EmbeddedSampler):
        yield f"cache {run.sampler.cache or policy.compute_dtype}"


def _held(optimizer: Optimizer) -> str:
    """Returns how trained weights are stored, and the dtype of their gradients."""
    if optimizer.weights_dtype == optimizer.slopes_dtype == "float32":
        return "weights and gradients float32"
    how = "float32" if optimizer.weights == "float32" else f"{optimizer.weights_dtype} ({optimizer.weights})"
    return f"weights {how} and gradients {optimizer.slopes_dtype}"


def _sampling(sampler: Any) -> str:
    name = components.selector(type(sampler))
    beside = ", adapters beside their base" if getattr(sampler, "adapters", False) else ""
    if isinstance(sampler, EmbeddedSampler):
        narrow = f", with matrices in {sampler.weights}" if sampler.weights else ""
        where = f"on devices of its own ({sampler.devices})" if sampler.devices else "on its devices"
        return f"{name}, in this process and {where}{beside}{narrow}"
    return f"{name}, by servers of their own{beside}"


def _verifiers(stages: Sequence[Stage]) -> Iterator[str]:
    """Yields each reward that evaluates what the model wrote, with its isolation."""
    rewards = [[stage.reward, *(e.reward for e in stage.evaluations)] for stage in stages]
    found = {components.selector(type(r)): r for r in components.parts(rewards, Isolating)}
    for name, reward in found.items():
        yield f"{name}, {reward.isolation()}"
    if not found:
        yield "none evaluates what the model writes"
