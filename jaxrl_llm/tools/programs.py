"""Compiles the programs of a run and reports what a device needs for them, also for a target that is not attached (`--topology`).

    python -m jaxrl_llm.launch --dry_run --topology=v6e:16x16 --gin_file=...
    python -m jaxrl_llm.tools.plan --topology=h200:8 --gin_file=...
    python -m jaxrl_llm.tools.bench --topology=v5p:4x4x4 --work=update --model=qwen2.5-1.5b

For a target each program has three more lines. The estimate is of its static cycles (TPUs alone, exchanges left out), beside the least
times of products, memory and links: model FLOPs over the peak, arguments and results over the bandwidth, sent bytes over the links. The
exchanges are counted by kind, with the bytes that a device sends; the program waits for SYNCHRONOUS ones.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.distributed import hlo, topology
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.learner import example
from jaxrl_llm.metrics import flops
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import memory
from jaxrl_llm.tools.memory import Account
from jaxrl_llm.tools.planning.chips import CHIPS, GIB, Chip
from jaxrl_llm.train.build import learner_of
from jaxrl_llm.train.describe import chosen_by
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage

CLOCKS: Mapping[str, float] = {"v5p": 1.75e9, "v6e": 1.75e9}  # clock rates of the cores in Hz


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target for which programs are compiled.

    Attributes:
      name: name, such as v6e:16x16.
      kind: kind of chip, such as v6e.
      devices: its devices; they compile and cannot run.
    """

    name: str
    kind: str
    devices: list[Any]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]


@contextmanager
def on(name: str | None) -> Iterator[Target | None]:
    """Opens the target of that name and chooses kernels for it meanwhile; None yields None for the process's own devices."""
    if name is None:
        yield None
        return
    target = Target(name=name, kind=topology.parsed(name)[0], devices=topology.devices(name))
    with dispatch.target(target.devices[0]), _attention_of(target):
        yield target


@contextmanager
def _attention_of(target: Target) -> Iterator[None]:
    """Makes JAX's interface of cuDNN use the target's compute capability meanwhile, in place of the attached GPU's."""
    from jax._src.cudnn import fused_attention_stablehlo as interface

    own = interface.check_compute_capability
    if target.kind in topology.GPUS:
        there = tuple(map(int, target.devices[0].compute_capability.split(".")))
        interface.check_compute_capability = lambda least: tuple(map(int, least.split("."))) <= there
    try:
        yield
    finally:
        interface.check_compute_capability = own


# -- a run -------------------------------------------------------------------------------------------------------------


def peaks(run: Any, target: Target | None = None) -> Iterator[str]:
    """Yields the peak memory of a device in each phase of each stage, from the memory accounts of its compiled programs.

    It yields no line for what is not a training run. For a target, figures of each program come first. Where the backend reports no
    memory, one line says so.

    Raises:
      MemoryError: a phase needs more than a chip of the target has; the message names settings that take less.
    """
    if not isinstance(run, Run):
        return
    policy = run.policy.policy(run.partitioner(target.devices if target else None))
    try:
        for stage in run.stages:
            with dispatch.recording() as kernels:
                accounts, phases = _phases(run, stage, policy, target)
            if target is not None:
                yield f"programs of {stage.name} for {target.name}, kernels {chosen_by(kernels)}"
                work = _work(run, stage, policy)
                for name, account in accounts.items():
                    yield from described(name, account, target, *work.get(name, (0.0, 1)))
            parts = ", ".join(f"{name} {peak / GIB:.3f}" for name, peak in phases.items())
            most = max(phases.values())
            yield f"peak of {stage.name:<5}{most / GIB:.3f} GiB a device by the account of the compiled programs ({parts})"
            if target is not None:
                check_fit(most, max(phases, key=lambda name: phases[name]), target)
    except memory.NoAccount as error:
        yield f"peak         unknown: {error}; go by the lines `memory` above, and leave room for what programs hold meanwhile"


def _phases(run: Run, stage: Stage, policy: Any, target: Target | None) -> tuple[dict[str, Account], dict[str, float]]:
    """Returns the account of each program of a stage, and the peak bytes of each phase."""
    learner = learner_of(stage, policy, 0)
    batch, bases = example.batch_of(stage, learner), memory.frozen(learner)
    accounts = memory.of_learner(learner, batch, 2 if example.summed(stage) else 1, bases)
    phases: dict[str, float] = {"update": max(account.peak for account in accounts.values())}
    if stage.samples:
        accounts |= memory.of_learner(learner, batch, 0, bases)
        phases["score"] = accounts["score"].peak
    weights, elsewhere = 0, dict[str, float]()  # on devices of the sampler's own
    if stage.samples and isinstance(run.sampler, EmbeddedSampler):
        sampled = run.sampler.placed(policy, target.devices if target else None)
        weights, accounts["decode"] = memory.of_sampling(sampled, run.sampler, stage, run.max_length)
        if target is not None:
            accounts["prefill"] = memory.of_prefill(sampled, run.sampler, stage, run.max_length)
        state = memory.size([learner.abstract.params, memory.resting(learner), bases])
        own = memory.size(memory.served_shapes(policy, run.sampler))  # among the program's arguments
        # The sum of base and adapters, which is served, or cast or copied to what is.
        summed = policy is not policy.plain and not run.sampler.adapters
        merged = memory.size(policy.plain.abstract()) if summed else 0
        if sampled is not policy:
            phases["publish"] = state + merged
            weights, elsewhere = 0, {"sample, on its own devices,": accounts["decode"].peak}
        else:
            phases["sample"] = state + accounts["decode"].peak - own
            if summed:
                phases["publish"] = state + (merged if weights else 0)
            weights = weights or merged
    if stage.offload_reference and "reference" in stage.needs and "score" in phases:
        phases["score"] += memory.size(memory.reference_of(stage, policy))
    also = weights + memory.reference(stage, policy)
    if (
        stage.teacher is not None and "teacher" in stage.algorithm.needs
    ):  # that of "teacher_divergence" is an argument of the update
        also += memory.size(stage.teacher.open(policy.partitioner).policy.abstract())
    return accounts, {name: peak + also for name, peak in phases.items()} | elsewhere


def _work(run: Run, stage: Stage, policy: Policy) -> dict[str, tuple[float, int]]:
    """Returns {program: (model FLOPs on all devices, reads of its arguments)} of a stage's programs, for full rows of the longest sequences."""
    size, packing = policy.architecture, stage.packing
    longest = example.longest(stage)
    lengths = [longest] * (packing.rows * packing.row_tokens // longest)
    found = {name: (flops.update(size, lengths), 1) for name in ("whole", "only", "accumulate")}
    found["score"] = flops.forward(size, lengths), 1
    if stage.samples and isinstance(run.sampler, EmbeddedSampler):
        capacity = memory.capacity_of(run.sampler, stage, run.max_length, policy.partitioner.batch_shards)
        steps = run.sampler.decode_chunk
        found["decode"] = flops.forward(size, [1]) * capacity.slots * steps, steps
    return found


def check_fit(peak: float, phase: str, target: Target) -> None:
    """Raises MemoryError where a phase needs more bytes a device than the target's chip has."""
    if peak > target.chip.memory:
        raise MemoryError(
            f"the {phase} needs {peak / GIB:.2f} GiB a device and {target.name} has {target.chip.memory / GIB:.2f}: lower ROWS, then "
            "ROW_TOKENS; recompute more by sources.PolicySource.remat = 'full'; take more chips and train.MeshConfig.fsdp = -1; keep "
            "moments on the host by train.Optimizer.offload = True; an embedded sampler takes less with fewer "
            "embedded.EmbeddedSampler.slots"
        )


# -- one program -------------------------------------------------------------------------------------------------------


def facts(account: Account, target: Target, model_flops: float = 0.0, readings: int = 1) -> dict[str, Any]:
    """Returns the compiler's figures of one program on one device.

    Args:
      account: its memory account, with the compiled program.
      target: the target for which it was compiled.
      model_flops: FLOPs of the model on all devices; 0 where the program computes none.
      readings: number of times that it reads its arguments.

    Returns:
      Seconds, bytes and cycles by name. `waited_bytes` is the largest synchronous exchange of a loop; `narrow_sums` are the
      instructions that add over devices in 16 bits; `unestimated`, where present, is the number of executions that `cycles` leaves out;
      `exchanges` are [kind, asynchronous, executions, bytes sent, bytes of the largest]. For many small programs in turn, which are not
      compiled, there is `peak_bytes` alone.
    """
    if account.program is None:
        return {"peak_bytes": account.peak - account.resident}
    program, chip = hlo.Program(account.program.as_text() or ""), target.chip
    found: dict[str, Any] = {
        "compile_s": account.seconds, "peak_bytes": account.peak - account.resident, "arguments_bytes": account.arguments,
        "temporary_bytes": account.temporary,
        "products_s": model_flops / len(target.devices) / chip.peak,
        "memory_s": (account.arguments * readings + account.outputs) / chip.bandwidth,
        "links_s": sum(one.sent for one in program.collectives if not one.network) / chip.link,
        "waited_bytes": program.waited,
        "narrow_sums": program.narrow_sums,
        "exchanges": [[*key, *value] for key, value in hlo.summed(program.collectives).items()],
    }  # fmt: skip
    if between := [one for one in program.collectives if one.network]:
        found["network_s"] = sum(one.sent for one in between) / chip.network
    if program.cycles:
        found |= {"cycles": program.cycles, "cycles_s": program.cycles / CLOCKS[target.kind]}
        found["kernels_s"] = stated_bytes(program) / chip.bandwidth
    if program.unestimated:
        found["unestimated"] = program.unestimated
    return found


def stated_bytes(program: hlo.Program) -> int:
    """Returns the bytes that Pallas kernels without an estimate of cycles declare to move, in the whole program on one device."""
    said = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
    kernels = [(i, times) for _, i, times, _ in program.executed if i.opcode == "custom-call" and not i.cycles]
    return sum(times * int(found[1]) for i, times in kernels if (found := said.search(i.rest)))


def described(
    name: str, account: Account, target: Target, model_flops: float = 0.0, readings: int = 1
) -> Iterator[str]:
    """Yields lines on one program of a target."""
    if account.program is None:
        return
    found = facts(account, target, model_flops, readings)
    sizes = ", ".join(f"{part} {found[f'{part}_bytes'] / GIB:.2f}" for part in ("arguments", "temporary"))
    yield (
        f"  {name:<10} {found['peak_bytes'] / GIB:.2f} of {target.chip.memory / GIB:.2f} GiB a device ({sizes}), compiled in "
        f"{found['compile_s']:.0f} s"
    )
    least = ", ".join(
        f"{part} {1e3 * found[f'{part}_s']:.3g} ms"
        for part in ("products", "memory", "links", "network")
        if f"{part}_s" in found
    )
    cycles = (
        f"{found['cycles'] / 1e6:.4g} M cycles = {1e3 * found['cycles_s']:.3g} ms without exchanges"
        if "cycles" in found
        else "no cycles from this compiler"
    )
    if found.get("kernels_s"):
        cycles += f", and {1e3 * found['kernels_s']:.3g} ms of Pallas kernels by the bytes that they state"
    if "unestimated" in found:
        cycles += f", and {found['unestimated']} executions whose cycles the compiler could not estimate"
    yield f"    estimate {cycles}; at the least {least}"
    parts = [
        f"{kind} {'asynchronous' if hidden else 'SYNCHRONOUS'} {times} x, {sent / 1e6:.3g} MB sent, the largest {most / 2**20:.3g} MiB"
        for kind, hidden, times, sent, most in found["exchanges"]
    ]
    yield f"    exchanges {'; '.join(parts) or 'none'}"
    if found["narrow_sums"]:
        yield f"    warning: {len(found['narrow_sums'])} sums over devices are rounded to 16 bits, so the loss depends on the mesh"
