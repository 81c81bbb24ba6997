"""What a run would do, before anything is compiled: mesh, parameters, batch arithmetic, memory by device, compile shapes."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import memory
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.eval.results import SAMPLES
from jaxrl_llm.mesh import Partitioner
from jaxrl_llm.samplers.embedded import EmbeddedSampler
from jaxrl_llm.stage_parts import learner_of
from jaxrl_llm.stages import Stage
from jaxrl_llm.train import Run

GIB = 2**30


def plan(run: Run | Harness) -> str:
    """The resolved plan of a run, or of an evaluation alone, as text.

    Raises:
      ValueError: what cannot work, naming the binding to change.
      OSError: a missing file.
    """
    partitioner = Partitioner.create(run.mesh)
    if isinstance(run, Harness):
        return "\n".join(_evaluation(run, partitioner))
    tokenizer = run.tokenizer.load()
    policy = run.policy.policy(partitioner)
    shards = partitioner.batch_shards
    lines = [
        f"run folder   {Path(run.run_dir).absolute()} (seed {run.seed})",
        *_machine(partitioner, policy, tokenizer),
        f"sampler      {run.sampler!r}",
    ]
    for stage, start in zip(run.stages, run.starts, strict=False):
        stage.check_devices(shards)
        stage.check_depth(policy.architecture.layers)
        lines += ["", *_stage(stage, start), *_memory(stage, policy, shards)]
    return "\n".join(lines)


def _evaluation(harness: Harness, partitioner: Partitioner) -> Iterable[str]:
    """What an evaluation alone would ask, and what of it is answered already."""
    model, evaluation, rows = harness.model.open(partitioner), harness.evaluation, harness.rows()
    yield f"results      {Path(harness.out_dir).absolute()} (seed {harness.seed})"
    yield f"weights      {model.name}"
    yield from _machine(partitioner, model.policy, model.tokenizer)
    yield f"sampler      {harness.sampler!r}"
    yield f"evaluation   {evaluation.name}: {len(rows)} prompts by {type(evaluation.data).__name__}, first: {rows[0].id}"
    for kind, n in evaluation.kinds.items():
        yield f"  {kind:<10} {n} a prompt = {n * len(rows)} responses, {evaluation.asked(kind)}"
    yield f"  lengths    prompt <= {harness.max_prompt_tokens}, response <= {evaluation.settings.max_tokens} tokens"
    yield f"  reward     {evaluation.reward!r}"
    yield f"  measures   {', '.join(map(repr, evaluation.measures)) or 'the mean reward alone'}"
    if (there := Path(harness.out_dir) / SAMPLES).is_file():
        yield f"  here       {sum(1 for _ in there.open(encoding='utf-8'))} responses already"


def _machine(partitioner: Partitioner, policy: Any, tokenizer: Any) -> list[str]:
    size = policy.architecture
    whole, trained = _count(policy.plain.abstract()) / 1e6, _count(policy.abstract()) / 1e6
    adapters = "" if policy is policy.plain else f" and {trained:.2f} M of adapters, which alone are trained"
    return [
        f"devices      {jax.device_count()} x {jax.devices()[0].device_kind}, mesh {_mesh(partitioner)}",
        f"model        {type(size).__name__}, {whole:.2f} M parameters{adapters}, compute in {policy.compute_dtype}, "
        f"remat {policy.remat}",
        f"tokenizer    {len(tokenizer)} tokens of a vocabulary of {size.vocabulary_size}",
    ]


def _mesh(partitioner: Partitioner) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in partitioner.axis_sizes.items())


def _count(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _stage(stage: Stage, start: int) -> Iterable[str]:
    """The batch arithmetic of a stage."""
    name, packing = type(stage.algorithm).__name__, stage.packing
    yield f"stage {stage.name}: {name}, steps {start + 1} to {start + stage.steps}, {stage.updates} updates"
    rows = stage.data.rows()
    yield f"  data         {len(rows)} rows, {stage.steps * stage.prompts_per_step / len(rows):.2f} epochs"
    if stage.samples:
        yield f"  batch        {stage.prompts_per_step} prompts x {stage.group_size} rollouts = {stage.sequences} sequences a step"
        yield f"  lengths      prompt <= {stage.max_prompt_tokens}, response <= {stage.settings.max_tokens} tokens"
    else:
        yield f"  batch        {stage.prompts_per_step} rows = {stage.sequences} sequences a step"
    yield f"  updates      {stage.minibatches} mini-batches x {stage.epochs} epochs, {stage.sequences // stage.minibatches} sequences each"
    yield f"  shapes       micro-batch [{packing.rows}, {packing.row_tokens}], view [{stage.sequences}, {stage.response_tokens}]"
    if stage.schedule is not None:
        yield f"  phases       {', '.join(phase.name for phase in stage.phases)} by {stage.schedule!r}"
    longest = stage.max_prompt_tokens + stage.settings.max_tokens - 1
    full = -(-stage.sequences // stage.minibatches * longest // (packing.rows * packing.row_tokens))
    yield f"  micro-batches at most about {max(full, 1)} a mini-batch (all sequences at their limits)"
    for evaluation in stage.evaluations:
        count = len(evaluation.data.rows())
        yield f"  evaluation   {evaluation.name}: {min(count, evaluation.limit or count)} prompts every {stage.evaluate_every} steps"


def _bytes(tree: Any) -> int:
    """Bytes of a tree of shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _memory(stage: Stage, policy: Any, shards: int) -> Iterable[str]:
    """Bytes of state on one device; activations are a bound by the saved residual streams."""
    one = _bytes(policy.abstract())
    reference = "reference" in stage.needs
    trained = (
        1 if "reward_model" in stage.value_models else 4
    )  # weights, and where they learn a gradient and two moments
    state = {"policy": trained * one} | ({"reference": one} if reference else {})
    if policy is not policy.plain:
        state["frozen base"] = _bytes(policy.plain.abstract()) * (2 if policy.lora.base_dtype == "bfloat16" else 4) // 4
    state |= {name: 4 * _bytes(source.model(policy).abstract()) for name, source in stage.value_models.items()}
    size, packing = policy.architecture, stage.packing
    kept = size.layers if policy.remat == "full" else size.layers * (8 + 4 * size.mlp_width // size.width)
    width = 4 if policy.compute_dtype == "float32" else 2
    activations = packing.rows // shards * packing.row_tokens * size.width * width * kept
    yield f"  memory       {sum(state.values()) / GIB:.3f} GiB of state ({', '.join(f'{n} {b / GIB:.3f}' for n, b in state.items())}) + about {activations / GIB:.3f} GiB of activations a device"


def peaks(run: Run | Harness) -> Iterable[str]:
    """The most memory on a device in each phase of each stage, by XLA's account of its programs, which takes their compilation.

    Raises:
      RuntimeError: the backend keeps no account.
    """
    if isinstance(run, Run):
        policy = run.policy.policy(Partitioner.create(run.mesh))
        for stage in run.stages:
            yield f"peak of {stage.name:<5}" + _peak(run, stage, policy)


def _peak(run: Run, stage: Stage, policy: Any) -> str:
    learner = learner_of(stage, policy, 0)
    batch, bases = memory.batch_of(stage, learner), memory.frozen(learner)
    longest = min(stage.max_prompt_tokens + stage.response_tokens - 1, stage.packing.row_tokens)
    tokens = stage.sequences // stage.minibatches * longest
    several = tokens > stage.packing.rows * stage.packing.row_tokens

    def most(microbatches: int) -> int:
        return max(account.peak for account in memory.of_learner(learner, batch, microbatches, bases).values())

    phases = {"update": most(2 if several else 1)}
    if stage.samples:
        phases["score"] = most(0)
    weights = 0
    if stage.samples and isinstance(run.sampler, EmbeddedSampler):
        weights, decoding = memory.of_sampling(policy.plain, run.sampler, stage, run.max_length)
        state = memory.size(learner.abstract) + memory.size(bases)
        own = memory.size(memory.cast(policy.plain, policy.compute_dtype))  # they are among the program's arguments
        phases["sample"] = state + decoding.peak - own
    also = weights + (memory.size(policy.abstract()) if "reference" in stage.algorithm.needs else 0)
    found = {name: (peak + also) / GIB for name, peak in phases.items()}
    parts = ", ".join(f"{name} {peak:.3f}" for name, peak in found.items())
    return f"{max(found.values()):.3f} GiB a device by the account of the compiled programs ({parts})"
