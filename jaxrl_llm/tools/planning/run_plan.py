"""The plan of a run as text: mesh, parameters, batch arithmetic, memory by device, compiled shapes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.eval.entropy_flow import EntropyFlow
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.eval.results import SAMPLES
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.metrics import flops
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded.room import Capacity, bucket, taken_bytes
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import memory, programs
from jaxrl_llm.tools.planning.chips import GIB
from jaxrl_llm.train.describe import describe
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage


def plan(run: Run | Harness | EntropyFlow, devices: Sequence[Any] | None = None) -> str:
    """Returns the resolved plan of a run, or of an evaluation or analysis alone, as text; on `devices`, by default all of the process's.

    Raises:
      ValueError: a setting cannot work; the message names the binding to change.
      OSError: a file is missing.
    """
    partitioner = run.partitioner(devices) if isinstance(run, Run) else Partitioner.create(run.mesh, devices)
    if isinstance(run, Harness):
        return "\n".join(_evaluation(run, partitioner))
    if isinstance(run, EntropyFlow):
        return "\n".join(_analysis(run, partitioner))
    policy = run.policy.policy(partitioner)
    tokenizer = run.tokenizer.load()
    shards = partitioner.batch_shards
    lines = [
        f"run folder   {Path(run.run_dir).absolute()} (seed {run.seed})",
        *_machine(partitioner, policy, tokenizer),
        f"sampler      {run.sampler!r}",
        *describe(run, policy),
    ]
    for stage, start in zip(run.stages, run.starts, strict=False):
        stage.check_devices(shards)
        stage.check_depth(policy.architecture.layers)
        lines += ["", *_stage(stage, start), _memory(stage, policy, shards)]
    return "\n".join(lines)


def _evaluation(harness: Harness, partitioner: Partitioner) -> Iterable[str]:
    """Yields lines on what an evaluation would sample, and how many responses exist already."""
    model, evaluation, rows = harness.opened(partitioner), harness.evaluation, harness.rows()
    yield f"results      {Path(harness.out_dir).absolute()} (seed {harness.seed})"
    yield f"weights      {model.name}"
    yield from _machine(partitioner, model.policy, model.tokenizer)
    yield f"sampler      {harness.sampler!r}"
    yield f"evaluation   {evaluation.name}: {len(rows)} prompts by {type(evaluation.data).__name__}, first: {rows[0].id}"
    for kind, n in evaluation.kinds.items():
        yield f"  {kind:<10} {n} a prompt = {n * len(rows)} responses, {evaluation.asked(kind)}"
    yield f"  lengths    prompt <= {harness.max_prompt_tokens}, response <= {evaluation.settings.max_tokens} tokens"
    yield from _cache(harness, model.policy, max(evaluation.kinds.values()) * len(rows))
    yield f"  reward     {evaluation.reward!r}"
    yield f"  measures   {', '.join(map(repr, evaluation.measures)) or 'the mean reward alone'}"
    if (there := Path(harness.out_dir) / SAMPLES).is_file():
        yield f"  here       {sum(1 for _ in there.open(encoding='utf-8'))} responses already"


def _analysis(flow: EntropyFlow, partitioner: Partitioner) -> Iterable[str]:
    """Yields lines on what an analysis of the entropy flow would sample and measure."""
    model, rows = flow.model.open(partitioner), flow.data.rows()[: flow.limit]
    yield f"results      {Path(flow.out_dir).absolute()}"
    yield f"weights      {model.name}"
    yield from _machine(partitioner, model.policy, model.tokenizer)
    yield f"sampler      {flow.sampler!r}"
    yield f"entropies    of {len(rows)} answers by {type(flow.data).__name__}, through {model.policy.architecture.layers} layers"
    yield f"  lengths    prompt <= {flow.max_prompt_tokens}, response <= {flow.settings.max_tokens} tokens"


def _cache(harness: Harness, policy: Any, responses: int) -> Iterable[str]:
    """Yields a line on the memory of an embedded sampler's slots at the longest prompts and responses."""
    sampler, settings = harness.sampler, harness.evaluation.settings
    if isinstance(sampler, EmbeddedSampler):
        shards = policy.partitioner.batch_shards
        slots = min(bucket(responses, shards), -(-sampler.slots // shards) * shards)
        batch = Capacity(slots=slots, length=harness.max_length, stop_ids=0, penalised=settings.repetition_penalty != 1)
        taken = taken_bytes(policy, batch, sampler.cache) / GIB
        yield f"  slots      {slots} of {harness.max_length} tokens take {taken:.3g} GiB a device; fewer are had where there is no room"


def _machine(partitioner: Partitioner, policy: Any, tokenizer: Any) -> list[str]:
    size = policy.architecture
    whole, trained = _count(policy.plain.sizes()) / 1e6, _count(policy.sizes()) / 1e6
    adapters = "" if policy is policy.plain else f" and {trained:.2f} M of adapters, which alone are trained"
    return [
        f"devices      {partitioner.mesh.size} x {dispatch.device().device_kind}, mesh {_mesh(partitioner)}",
        f"model        {type(size).__name__}, {whole:.2f} M parameters{adapters}, compute in {policy.compute_dtype}, "
        f"remat {policy.remat}",
        f"tokenizer    {len(tokenizer)} tokens of a vocabulary of {size.vocabulary_size}",
    ]


def _mesh(partitioner: Partitioner) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in partitioner.axis_sizes.items())


def _count(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _stage(stage: Stage, start: int) -> Iterable[str]:
    """Yields the batch arithmetic of a stage."""
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


def _memory(stage: Stage, policy: Policy, shards: int) -> str:
    """Returns a line with the state's bytes, and a bound on the activations from the residual streams that are saved."""
    size, packing = policy.architecture, stage.packing
    kept = size.layers if policy.remat == "full" else int(size.layers * (8 + 4 * flops.mlp_width(size) // size.width))
    width = 4 if policy.compute_dtype == "float32" else 2
    activations = packing.rows // shards * packing.row_tokens * size.width * width * kept
    found = memory.state(stage, policy)
    held = ", ".join(f"{name} {held / GIB:.3f}" for name, held in found.items())
    return f"  memory       {sum(found.values()) / GIB:.3f} GiB of state ({held}) + about {activations / GIB:.3f} GiB of activations a device"


def on_target(run: Run | Harness | EntropyFlow, name: str | None) -> Iterator[str]:
    """Yields the plan of a run and its programs' memory, for a target or, where its name is None, for the process's devices."""
    with programs.on(name) as target:
        yield plan(run, target.devices if target else None)
        yield from programs.peaks(run, target)
