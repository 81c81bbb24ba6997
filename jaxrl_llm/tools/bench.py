"""Benchmarks the update, scoring, sampling and a whole step at the shapes of real models, with random weights.

    python -m jaxrl_llm.tools.bench --work=update --model=qwen2.5-1.5b --rows=8 --row_tokens=4096 --remat=full,attention

It runs the project's own Learner, Policy and EmbeddedSampler, and prints one JSON line for each configuration. A flag takes
several values, separated by commas; each combination is measured in its own process, one after the other, so that its memory
peak is its own and a failure does not affect the others. Times are medians of calls that wait for their result; tokens/s and MFU
follow metrics/flops.py: causal attention, real head width, head counted, embedding not counted, recomputation not counted.
--work=speedrun launches whole runs of a gin file, one for each of --seeds, and prints their row of the leaderboard (eval/reports/leaderboard.py).
With --topology=v6e:16x16 and the like, programs are compiled for a target that need not be attached (programs.py), and nothing runs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed import compilation_cache, topology, xla_flags
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.eval.reports import leaderboard
from jaxrl_llm.experience import Group, Prompt, SamplingParams
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import api as attention
from jaxrl_llm.kernels.decode_attention import api as decode_attention
from jaxrl_llm.kernels.delta_rule import api as delta_rule
from jaxrl_llm.kernels.token_stats import api as token_stats
from jaxrl_llm.learner import example
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.metrics import flops, profiling, run_folder
from jaxrl_llm.models.policy import Params
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.tools import memory, programs
from jaxrl_llm.tools.bench_case import SWEPT, Case, full_rows, lengths_of, micro_batches, packed, rollout, scored
from jaxrl_llm.tools.planning.chips import GIB

# -- what is measured --------------------------------------------------------------------------------------------------


def timed(case: Case, call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the seconds of the first call, which compiles its program or reads it from the compilation cache, and of each later call,
    with the later calls' median, least and most."""
    seconds = []
    for _ in range(case.repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    later = seconds[1:]
    found: dict[str, Any] = {"first_s": seconds[0], "calls_s": later, "s": float(np.median(later))}
    found |= {"least_s": min(later), "most_s": max(later)}
    return found | ({"profile": traced(case.profile, call)} if case.profile else {})


def traced(folder: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Traces one call and returns the summary of the trace."""
    with jax.profiler.trace(folder):
        jax.block_until_ready(call())
    return profiling.summary(profiling.newest(Path(folder)))


def rates(case: Case, lengths: Sequence[int], seconds: float, count: Callable[..., float]) -> dict[str, float]:
    """Returns tokens/s over all devices, and model FLOP/s and MFU per device."""
    model_flops, devices = count(case.policy.architecture, lengths), case.policy.partitioner.mesh.size
    found = {"tokens_per_s": sum(lengths) / seconds, "tflops": model_flops / seconds / devices / 1e12}
    peak = flops.peak(jax.devices()[0].device_kind)
    return found if peak is None else found | {"mfu": flops.mfu(model_flops, seconds, devices, peak)}


def update(case: Case) -> dict[str, Any]:
    """Measures one update: forward, backward and AdamW over all micro-batches, with the state donated."""
    learner, batch = case.learner, full_rows(case)
    batches = micro_batches(case, batch, {})
    account = compiled(case, batches[0], len(batches))
    state = learner.init({"policy": case.policy.init(jax.random.key(0))})

    def call() -> Any:
        nonlocal state
        state, metrics = learner.update(state, batches)
        return state.step, metrics

    times = timed(case, call)
    if int(to_host(state.skipped)):
        raise FloatingPointError("the updates had gradients that are not finite")
    found = {"micro_batches": len(batches), "compilations": learner.compilations}
    return times | rates(case, lengths_of(batch), times["s"], flops.update) | found | account


def score(case: Case) -> dict[str, Any]:
    """Measures log-probs and entropies of all micro-batches, without gradient."""
    learner, batch = case.learner, full_rows(case)
    params = {"policy": case.policy.init(jax.random.key(0))}
    device = [to_device(bare(rows), learner.partitioner) for rows in batch.rows]
    account = compiled(case, device[0], 0)
    times = timed(case, lambda: [learner.score(params, rows) for rows in device])
    return times | rates(case, lengths_of(batch), times["s"], flops.forward) | account


async def drawn(case: Case, engine: Engine, params: Params, version: int) -> list[Group]:
    """Publishes the parameters, then samples a group of rollouts for each random prompt."""
    await engine.publish(params, version)
    rng = np.random.default_rng(version)
    vocabulary, limits = case.policy.architecture.vocabulary_size, case.sampled[:, 1]
    prompts = [rng.integers(0, vocabulary, count, dtype=np.int32) for count in case.sampled[:, 0]]
    groups = []

    async def until(limit: int) -> None:
        """Samples for the prompts whose responses have so many tokens."""
        (places,) = np.nonzero(limits == limit)
        settings = SamplingParams(max_tokens=limit, min_tokens=limit)
        asked = engine.sample([prompts[place] for place in places], case.group, settings, places.tolist())
        async for index, samples in asked:
            prompt = Prompt(id=str(places[index]), tokens=prompts[places[index]], source="bench")
            groups.append(scored([rollout(prompt, s.tokens, rng, s.logprobs) for s in samples], rng))

    await asyncio.gather(*(until(int(limit)) for limit in np.unique(limits)))
    return groups


def sample(case: Case) -> dict[str, Any]:
    """Measures sampling of all prompts; the floor is what a decode step must read: the weights and the filled cache entries."""

    async def run() -> dict[str, Any]:
        engine = case.start_sampler()
        params, seconds = case.policy.init(jax.random.key(0)), []
        for version in range(1 + max(case.repeats // 4, 1)):
            start = time.perf_counter()
            await drawn(case, engine, params, version)
            seconds.append(time.perf_counter() - start)
        occupancy = engine.metrics()["sampler/occupancy"]
        await engine.close()
        tokens, size = case.group * int(case.sampled[:, 1].sum()), case.policy.architecture
        median, width = float(np.median(seconds[1:])), 2 if case.dtype == "bfloat16" else 4
        slots = min(case.slots, case.prompts * case.group)
        step = median * slots / tokens
        entry = (
            2 * len(flops.attending(size)) * size.kv_heads * size.head_width * (width if case.cache == "auto" else 1)
        )
        weights = sum(x.size for x in jax.tree.leaves(case.policy.abstract())) * width
        held = float(np.mean(case.sampled @ [1, 0.5])) * entry + 2 * flops.state_bytes(size)
        floor = weights + slots * held
        return {
            "first_s": seconds[0], "s": median, "generated_per_s": tokens / median, "step_ms": step * 1e3,
            "floor_gb": floor / 1e9, "floor_gb_per_s": floor / step / 1e9, "occupancy": occupancy,
        }  # fmt: skip

    return asyncio.run(run())


def step(case: Case) -> dict[str, Any]:
    """Measures whole steps: publish and sample, score, compute advantages, update; returns the seconds of each part of the last step."""

    async def run() -> dict[str, Any]:
        learner, engine = case.learner, case.start_sampler()
        state = learner.init({"policy": case.policy.init(jax.random.key(0))})
        for version in range(2 + (case.repeats > 4)):
            marks = [time.perf_counter()]
            batch = packed(case, await drawn(case, engine, state.policy, version))
            marks.append(time.perf_counter())
            device = [to_device(bare(rows), learner.partitioner) for rows in batch.rows]
            scored = [learner.score(state.params, rows)["policy"] for rows in device]
            stats = {
                field: batch.unpack([to_host(s[name]) for s in scored])
                for name, field in (("logprob", "old_logprobs"), ("entropy", "entropy"))
            }
            mini = micro_batches(case, batch, stats)
            marks.append(time.perf_counter())
            state, metrics = learner.update(state, mini)
            jax.block_until_ready((state.step, metrics))
            marks.append(time.perf_counter())
        await engine.close()
        lengths, seconds = lengths_of(batch), np.diff(marks)
        model_flops = flops.update(case.policy.architecture, lengths) / seconds[2] / 1e12
        return dict(zip(("sample_s", "score_s", "update_s"), seconds.tolist())) | {
            "s": marks[-1] - marks[0], "tokens_per_s": sum(lengths) / (marks[-1] - marks[0]), "micro_batches": len(mini),
            "fill": sum(lengths) / sum(rows.tokens.size for rows in batch.rows), "update_tflops": model_flops,
            "gap": float(np.abs(stats["old_logprobs"] - batch.fields["sampler_logprobs"])[batch.fields["mask"]].mean()),
        }  # fmt: skip

    return asyncio.run(run())


WORKS: dict[str, Callable[[Case], dict[str, Any]]] = {"update": update, "score": score, "sample": sample, "step": step}


def compiled(case: Case, batch: MicroBatch, microbatches: int) -> dict[str, float]:
    """Returns the seconds to compile an update's programs (scoring's with 0 micro-batches), and the memory account of the largest program."""
    start = time.perf_counter()
    accounts = memory.of_learner(case.learner, batch, microbatches).values()
    most = max(accounts, key=lambda account: account.peak)
    there = (
        most.peak if microbatches else most.peak - most.resident
    )  # scoring is measured without an optimizer's moments
    return {
        "compile_s": time.perf_counter() - start, "predicted_gib": there / GIB,
        "arguments_gib": most.arguments / GIB, "temporary_gib": most.temporary / GIB,
    }  # fmt: skip


def for_target(case: Case, target: programs.Target) -> dict[str, Any]:
    """Returns the compiler's figures of the case's program for a target, in place of a measurement.

    Raises:
      ValueError: the work is not a single program.
    """
    size, learner, accounts = case.policy.architecture, case.learner, {}
    with dispatch.recording() as kernels:
        if case.work in ("update", "score"):
            batch = full_rows(case)
            shapes = example.shapes_of(batch, learner, {}, len(batch.groups))
            accounts = memory.of_learner(learner, shapes, len(batch.minibatches[0]) if case.work == "update" else 0)
            count, readings = (flops.update if case.work == "update" else flops.forward)(size, lengths_of(batch)), 1
        elif case.work == "sample":
            served, cache = memory.cast(case.policy, case.dtype), None if case.cache == "auto" else case.cache
            length, readings = case.prompt_tokens + case.response_tokens, case.decode_chunk
            program = decode.lowered(case.policy, served, case.slots, length, readings, cache, case.page)
            accounts = {"decode": memory.account(program)}
            count = flops.forward(size, [1]) * case.slots * readings
        else:
            raise ValueError(f"--work={case.work} is no program to compile for a target: use update, score or sample")
    found = {name: programs.facts(account, target, count, readings) for name, account in accounts.items()}
    return {"kernels": [f"{choice.op} {choice.backend}" for choice in kernels], "programs": found}


# -- the command -------------------------------------------------------------------------------------------------------


def prefer(case: Case) -> None:
    """Puts the backends that flags name first among their kernels' backends.

    Raises:
      ValueError: there is no such backend.
    """
    for api in (attention, token_stats, decode_attention, delta_rule):
        name = case.flags[api.__name__.split(".")[-2]]
        if name != "auto":
            if name not in api.BACKENDS:
                raise ValueError(f"unknown backend {name!r}: use auto or one of {api.BACKENDS}")
            vars(api)["BACKENDS"] = (name, *(b for b in api.BACKENDS if b != name))


def measure(case: Case) -> dict[str, Any]:
    """Returns the result row of one configuration."""
    found = WORKS[case.work](case)
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        found["peak_gib"] = stats["peak_bytes_in_use"] / GIB
    return {n: float(f"{x:.5g}") if isinstance(x, float) else x for n, x in found.items()}


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yields every combination of the flags' values."""
    values = [getattr(arguments, name).split(",") for name in SWEPT]
    for combination in product(*values):
        yield dict(zip(SWEPT, combination))


def row(flags: dict[str, str], repeats: int, profile: str | None, on: str | None = None) -> dict[str, Any]:
    """Returns the JSON row of one combination, measured in this process, or compiled for the target `on`."""
    typed = {name: SWEPT[name][0](value) for name, value in flags.items()}
    for name, known in (("work", WORKS), ("model", SHAPES)):
        if typed[name] not in known:
            raise ValueError(f"--{name}={typed[name]} is not one of {', '.join(known)}")
    with programs.on(on) as target:
        typed["devices"] = typed["devices"] or (len(target.devices) if target else jax.device_count())
        facts = {"device": dispatch.device().device_kind, "jax": jax.__version__, "commit": run_folder.commit()}
        case = Case(flags=typed, repeats=repeats, profile=profile, own=target.devices if target else None)
        prefer(case)
        return {**typed, **facts, **(for_target(case, target) if target else measure(case))}


def in_process(flags: dict[str, str], more: Sequence[str], limit: float) -> dict[str, Any]:
    """Returns the JSON row of one combination, measured in a new process; {"error"} where it fails."""
    command = [sys.executable, "-m", "jaxrl_llm.tools.bench", *more, *(f"--{n}={v}" for n, v in flags.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**flags, "error": f"took more than {limit:g} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {**flags, "error": " | ".join(said[-3:])[-800:]}


def speedrun(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Makes and prints a row of the leaderboard; refuses a row whose runs are incomplete."""
    if not arguments.gin_file or arguments.runs is None:
        parser.error("--work=speedrun needs --gin_file and --runs: the runs, and the folder that they lie in")
    try:
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds must be whole numbers, separated by commas (got {arguments.seeds!r})")
    found = leaderboard.speedrun(arguments.gin_file, arguments.gin, seeds, arguments.runs, arguments.name)
    tell(found, arguments.output)
    print(leaderboard.line(found), file=sys.stderr)
    return 0


def tell(found: dict[str, Any], output: str | None) -> None:
    """Prints a row, and appends it to a file where `output` names one."""
    print(json.dumps(found), flush=True)
    if output:
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the rows; the exit code is 1 where a configuration failed."""
    parser = command_line.parser("tools.bench", __doc__)
    for name, (_, default, meaning) in SWEPT.items():
        parser.add_argument(f"--{name}", default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--repeats", type=int, default=5, help="measured calls after the first")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds of one configuration, where there are several"
    )
    parser.add_argument(
        "--profile", metavar="FOLDER", help="trace one more update or score into the folder, and sum it up"
    )
    parser.add_argument("--output", help="file that rows are added to")
    parser.add_argument(
        "--topology", metavar="NAME", help="compile for v6e:16x16, v5p:4x4x4, h200:8 ..., and measure nothing"
    )
    parser.add_argument("--gin_file", action="append", default=[], help="of --work=speedrun: as launch takes it")
    parser.add_argument("--gin", action="append", default=[], help="of --work=speedrun: as launch takes it")
    parser.add_argument("--seeds", default="0", help="of --work=speedrun: a run for each (default 0)")
    parser.add_argument("--runs", type=Path, help="of --work=speedrun: folder of the runs")
    parser.add_argument("--name", default="", help="of --work=speedrun: what the row is called")
    arguments = parser.parse_args(argv)
    if arguments.work == "speedrun":
        return speedrun(parser, arguments)
    if arguments.topology:
        topology.prepare(arguments.topology)
    else:
        xla_flags.apply()
    compilation_cache.keep()  # a call reuses the program that was compiled for its memory account
    wanted, failed = list(cases(arguments)), 0
    more = [f"--repeats={arguments.repeats}", *([f"--profile={arguments.profile}"] if arguments.profile else [])]
    more += [f"--topology={arguments.topology}"] if arguments.topology else []
    for number, flags in enumerate(wanted, 1):
        alone = len(wanted) == 1
        told = ", ".join(f"{n}={v}" for n, v in flags.items() if n in ("work", "model") or v != SWEPT[n][1])
        print(
            f"# {number} of {len(wanted)}: {told}: compiles, which may take minutes, and measures",
            file=sys.stderr,
            flush=True,
        )
        found = (
            row(flags, arguments.repeats, arguments.profile, arguments.topology)
            if alone
            else in_process(flags, more, arguments.limit)
        )
        failed += "error" in found
        tell(found, arguments.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
