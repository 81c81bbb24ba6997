"""Plans a run before it starts: mesh, parameters, batch arithmetic, memory by device, compiled shapes.

    python -m jaxrl_llm.tools.plan --gin_file=gin/grpo_qwen_coder_0p5b_gsm8k.gin --chips=h200,v5p,v6e --counts=1,4,64,4096
    python -m jaxrl_llm.tools.plan --compare=speed.jsonl
    python -m jaxrl_llm.tools.plan --gin_file=gin/grpo_gsm8k.gin --gin="PRETRAINED='FOLDER'" --fit --device=rtx4090
    python -m jaxrl_llm.tools.plan --gin_file=... --topology=v6e:16x16

The first command simulates the steps of a run on fleets of chips (cost_model.py), the second compares the cost model with rows of
`bench`, the third prints settings that fit a device, as gin lines, and the fourth compiles the run's programs for a target that need
not be attached (programs.py).
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache, topology
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.eval.results import SAMPLES
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.embedded.slots import Capacity, bucket, taken_bytes
from jaxrl_llm.tools import cost_model, fit, memory, programs
from jaxrl_llm.tools.memory import GIB
from jaxrl_llm.train.describe import describe
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage


def plan(run: Run | Harness, devices: Sequence[Any] | None = None) -> str:
    """Returns the resolved plan of a run, or of an evaluation alone, as text; on `devices`, by default all that the process has.

    Raises:
      ValueError: a setting cannot work; the message names the binding to change.
      OSError: a file is missing.
    """
    partitioner = Partitioner.create(run.mesh, devices)
    if isinstance(run, Harness):
        return "\n".join(_evaluation(run, partitioner))
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
    model, evaluation, rows = harness.model.open(partitioner), harness.evaluation, harness.rows()
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
    whole, trained = _count(policy.plain.abstract()) / 1e6, _count(policy.abstract()) / 1e6
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
    """A line with the state's bytes, and a bound on the activations from the residual streams that are saved."""
    size, packing = policy.architecture, stage.packing
    kept = size.layers if policy.remat == "full" else size.layers * (8 + 4 * size.mlp_width // size.width)
    width = 4 if policy.compute_dtype == "float32" else 2
    activations = packing.rows // shards * packing.row_tokens * size.width * width * kept
    found = memory.state(stage, policy)
    held = ", ".join(f"{name} {held / GIB:.3f}" for name, held in found.items())
    return f"  memory       {sum(found.values()) / GIB:.3f} GiB of state ({held}) + about {activations / GIB:.3f} GiB of activations a device"


# -- the command -------------------------------------------------------------------------------------------------------

ASSUMED = """measured     rates of one H200 (1.5B updates, scoring and embedded sampling); compared with 2 and 4 GPUs and with 0.5B and 7B
assumed      {length} tokens of response in the mean, full rows; half of all exchanges behind computation; links {links};
             prices {prices} dollars a chip and hour; rewards, publication and evaluation take no time
extrapolated rows marked *: other chips take the H200's shares of their own peaks, and more than {most} chips were not run"""
HEAD = (
    "chip   chips  fsdp x data  rows  sample s  score s  update s   step s  sampler:learner  GiB a chip  dollars a step"
)


def setting_of(run: Run, stage: Stage) -> cost_model.Setting:
    """The cost model's settings of a run's model and optimizer."""
    policy = run.policy.policy(Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    width = {"float32": 4, "bfloat16": 2}
    optimizer = stage.optimizer
    moments = 0 if optimizer.offload else width[optimizer.moments_dtype] + width[optimizer.second_moment_dtype]
    unrolled = policy.unroll >= policy.architecture.layers
    return cost_model.Setting(sizes=policy.architecture, remat=policy.remat, unrolled=unrolled, moments=moments)


def fleets(
    run: Run, chips: Sequence[str], counts: Sequence[int], response: int | None, grow: bool = False
) -> Iterator[str]:
    """Yields a line for each kind of chip and count, for the run's first stage that samples; its batch may `grow` with the chips.

    Raises:
      ValueError: no stage of the run samples.
    """
    stage = next((stage for stage in run.stages if stage.samples), None)
    if stage is None:
        raise ValueError("no stage of this run samples: the simulator is of RL steps")
    length = response or stage.settings.max_tokens
    step = {
        "sequences": stage.sequences, "prompt": stage.max_prompt_tokens, "response": length,
        "row_tokens": stage.packing.row_tokens, "updates": stage.minibatches * stage.epochs,
        "forwards": int(stage.old_logprobs == "learner") + int("reference" in stage.needs),
        "slots": run.sampler.slots if isinstance(run.sampler, EmbeddedSampler) else 512,
    }  # fmt: skip
    setting, known = setting_of(run, stage), cost_model.CHIPS
    links = ", ".join(f"{n} {known[n].link / 1e9:g} and {known[n].network / 1e9:g} GB/s" for n in chips)
    prices = ", ".join(f"{n} {known[n].dollars:g}" for n in chips)
    yield f"run          {setting.weights / 1e9:.2f} B parameters, remat {setting.remat}, {json.dumps(step)}"
    yield ASSUMED.format(length=length, links=links, prices=prices, most=cost_model.MEASURED_CHIPS)
    yield HEAD
    for name in chips:
        for count in counts:
            more = {"sequences": step["sequences"] * (count if grow else 1)}
            yield fleet_line(name, count, cost_model.fleet(known[name], setting, count, step | more))


def fleet_line(name: str, count: int, found: Mapping[str, float] | None) -> str:
    """Formats a row of the table; * marks extrapolated rows."""
    mark = " " if name == "h200" and count <= cost_model.MEASURED_CHIPS else "*"
    if found is None:
        return (
            f"{name:<5}{mark}{count:>6}  does not fit: more chips, or remat, moments and offload in docs/howto/speed.md"
        )
    idle = "" if found["busy"] == 1 else f"  ({found['busy']:.2g} of the chips have rows to learn from)"
    mesh = f"{found['fsdp']:g} x {found['data']:g}"
    times = f"{found['sample']:>9.3g} {found['score']:>8.3g} {found['update']:>9.3g} {found['step']:>8.3g}"
    more = f"{found['ratio']:>14.2f}:1 {found['gib']:>11.1f} {found['dollars']:>15.4g}{idle}"
    return f"{name:<5}{mark}{count:>6}  {mesh:>11} {found['rows']:>5g} {times} {more}"


def compared(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields measured and simulated seconds and memory for rows of `bench` on H200s; other rows are left out."""
    for row in rows:
        if (
            row.get("work") not in ("update", "score")
            or "s" not in row
            or "H200" not in row["device"]
            or row["offload"]
            or row.get("layers")
        ):
            continue
        setting, tokens, length = cost_model.of_row(row, SHAPES[row["model"]])
        chip = cost_model.CHIPS["h200"]
        if row["work"] == "update":
            seconds = sum(cost_model.update_seconds(chip, setting, tokens, length).values())
            gib = cost_model.memory_bytes(setting, tokens) / GIB
            room = f"  {row['peak_gib']:7.2f} GiB, simulated {gib:7.2f} ({gib / row['peak_gib'] - 1:+.1%})"
        else:
            seconds, room = cost_model.score_seconds(chip, setting, tokens, length), ""
        what = f"{row['work']} {row['model']} {row['rows']} x {row['row_tokens']}, {row['remat']}, {row['devices']} GPU"
        yield f"{what:<52} {row['s']:.4f} s, simulated {seconds:.4f} ({seconds / row['s'] - 1:+.1%}){room}"


def on_target(run: Run | Harness, name: str | None) -> Iterator[str]:
    """Yields the plan of a run and what its programs need, on a target or, where its name is None, on the process's devices."""
    with programs.on(name) as target:
        yield plan(run, target.devices if target else None)
        yield from programs.peaks(run, target)


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.plan", __doc__)
    parser.add_argument("--gin_file", action="append", metavar="FILE", help="gin file of a run; may be repeated")
    parser.add_argument(
        "--gin", action="append", default=[], metavar="BINDING", help="binding that overrides the files"
    )
    parser.add_argument("--chips", default=",".join(cost_model.CHIPS), help="kinds of chips (default all)")
    parser.add_argument("--counts", default="1,2,4,8,16,64,256,1024,4096", help="chips of a fleet")
    parser.add_argument("--response_tokens", type=int, help="mean tokens of a response (default: the run's limit)")
    parser.add_argument("--grow", action="store_true", help="the run's batch is that of one chip, and grows with them")
    parser.add_argument("--fit", action="store_true", help="print settings that fit a device, as gin lines")
    parser.add_argument(
        "--device", help=f"device to fit: {', '.join(fit.DEVICES)} or NAME=GIB (default: the one at hand)"
    )
    parser.add_argument(
        "--topology", metavar="NAME", help="compile the run's programs for v6e:16x16, v5p:4x4x4, h200:8 ..."
    )
    parser.add_argument("--compare", metavar="FILE", help="rows that `bench --output` wrote")
    arguments = parser.parse_args(argv)
    if bool(arguments.gin_file) == bool(arguments.compare):
        parser.error("give --gin_file or --compare, one of the two")
    if arguments.topology and arguments.compare:
        parser.error("--topology compiles the programs of a run: give --gin_file")
    chips = arguments.chips.split(",")
    if unknown := set(chips) - set(cost_model.CHIPS):
        parser.error(f"unknown chips {sorted(unknown)}: use some of {', '.join(cost_model.CHIPS)}")
    compilation_cache.keep()
    if arguments.topology:
        topology.prepare(arguments.topology)
        run, _ = command_line.build(arguments.gin_file, arguments.gin)
        lines = on_target(run, arguments.topology)
    elif arguments.compare:
        lines = compared(map(json.loads, Path(arguments.compare).read_text(encoding="utf-8").splitlines()))
    else:
        run, config = command_line.build(arguments.gin_file, arguments.gin)
        lines = (
            fit.fitted(run, config, fit.named(arguments.device))
            if arguments.fit
            else fleets(
                run, chips, [int(n) for n in arguments.counts.split(",")], arguments.response_tokens, arguments.grow
            )
        )
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
