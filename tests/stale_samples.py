"""Measures what replaying recorded experts does to stale samples.

    PYTHONPATH=. python tests/stale_samples.py RUN [RUN ...] --lags 0,1,2,4,8

Each run trained a model with experts and kept its checkpoints. For each lag, the checkpoint of so many steps before the last one samples
and records its experts, and the last one reads the samples twice, with its own choice of experts and with the recorded one. The command
prints a table of means over the runs, writes all figures as JSON where `--out` is given, and draws them where `--plot` is.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.eval.reports import plot
from jaxrl_llm.experience import Group, Prompt, unscored
from jaxrl_llm.learner import score
from jaxrl_llm.learner.batch import Batch, bare, to_device
from jaxrl_llm.learner.router import Router
from jaxrl_llm.metrics import diagnostics
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Params
from jaxrl_llm.rollouts.collect import RolloutGenerator
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.train.load import Saved, saved

FAR = 0.2  # a token is far off where its ratio is more than this from 1: the lower bound of PPO's clipping
ARMS: dict[str, Literal["off", "R3"]] = {"live": "off", "replayed": "R3"}
SHOWN = {"differs": "other experts", "mean": "gap, nats", "far": "far off"}


class Asked(NamedTuple):
    """What is sampled.

    Attributes:
      prompts: number of prompts, the first of the last stage's data.
      samples: number of samples of each.
      dtype: compute dtype of the sampler; the reader has the run's.
    """

    prompts: int
    samples: int
    dtype: str


async def _sampled(policy: Policy, params: Params, run: Any, asked: Asked) -> list[Group]:
    stage, tokenizer = run.stages[-1], run.tokenizer.load()
    encoder = Encoder(
        tokenizer=tokenizer, max_prompt_tokens=stage.max_prompt_tokens, template_kwargs=stage.template_kwargs
    )
    prompts: list[Prompt] = encoder.prompts(list(stage.data.rows())[: asked.prompts])
    settings, length = with_stop_ids(stage.settings, tokenizer), stage.max_prompt_tokens + stage.settings.max_tokens
    engine = EmbeddedSampler(record_routes=True, share_weights=False).start(policy, tokenizer, max_length=length)
    await engine.publish(params, 0)
    generator = RolloutGenerator(sampler=engine, tokenizer=tokenizer)
    groups = [
        unscored(rollouts)
        async for _, rollouts in generator.groups(prompts, asked.samples, settings, range(len(prompts)))
    ]
    await engine.close()
    return groups


@partial(jax.jit, static_argnames=("policy", "replay"))
def _elsewhere(params: Params, batch: MicroBatch, *, policy: Policy, replay: bool) -> tuple[jax.Array, jax.Array]:
    """How many tokens of all layers were read with other experts than the recorded ones, and how many have a record."""
    assert policy.architecture.experts is not None
    places = (batch.tokens, batch.positions, batch.segments)
    report = policy.routed(params, *places, routes=batch.routes, replay=replay)[1]
    assert report is not None
    used, record = jnp.sort(jnp.moveaxis(report.chosen, 0, 2)), jnp.sort(jnp.asarray(batch.routes))
    there = record[..., -1] < policy.architecture.experts.count
    return jnp.sum(there & jnp.any(used != record, axis=-1)), jnp.sum(there)


def scorers_of(source: Saved) -> dict[str, score.Scorer]:
    """What reads the samples, {"live" or "replayed": it}; each compiles its program once."""
    stage = source.run.stages[-1]
    return {
        arm: score.Scorer(
            models={"policy": source.policy}, algorithm=stage.algorithm, temperature=stage.settings.temperature,
            max_segments=stage.packing.sequences_per_row, router=Router(replay=replay),
        )
        for arm, replay in ARMS.items()
    }  # fmt: skip


def read(
    source: Saved, scorers: Mapping[str, score.Scorer], params: Params, groups: Sequence[Group]
) -> dict[str, dict[str, float]]:
    """What the reader finds in the samples, {"live" or "replayed": {name: value}}: the gap in nats, and shares."""
    stage, policy = source.run.stages[-1], source.policy
    count = sum(len(group.rollouts) for group in groups)
    kinds = sorted({r.prompt.source for group in groups for r in group.rollouts})
    batch = Batch.build(
        groups, stage.packing, minibatches=1, sources=kinds, response_tokens=stage.settings.max_tokens, capacity=count
    )
    rows = [to_device(bare(packed, batch.recorded), policy.partitioner) for packed in batch.rows]
    found = {}
    for arm, scorer in scorers.items():
        stats = score.token_stats(scorer, {"policy": params}, batch, {})  # type: ignore[arg-type]
        moved = [_elsewhere(params, micro, policy=policy, replay=ARMS[arm] == "R3") for micro in rows]
        apart = stats["old_logprobs"] - batch.fields["sampler_logprobs"]
        ratios = np.exp(apart[batch.fields["mask"]].astype(np.float64))
        found[arm] = {
            **{name: diagnostics.gap(batch, stats)[f"gap/{name}"] for name in ("mean", "p99", "max", "k3")},
            "differs": float(sum(int(n) for n, _ in moved) / sum(int(n) for _, n in moved)),
            "far": float(np.mean(np.abs(ratios - 1) > FAR)),
        }
    return found


def measure(run_dir: Path, lags: Sequence[int], asked: Asked) -> list[dict[str, Any]]:
    """The figures of a run, one dictionary for each lag.

    Raises:
      OSError: the run did not keep a checkpoint that is asked for.
      ValueError: its model has no experts.
    """
    last = saved(run_dir)
    if last.policy.architecture.experts is None:
        raise ValueError(f"the model of {run_dir} has no experts to replay: name a run of a model with experts")
    newest, found = last.merged(), []
    sampling = replace(last.run.policy, compute_dtype=asked.dtype).policy(last.policy.partitioner)
    scorers = scorers_of(last)
    for lag in lags:
        older = saved(run_dir, step=last.step - lag, partitioner=last.policy.partitioner).merged()
        groups = asyncio.run(_sampled(sampling, older, last.run, asked))
        found.append({"run": run_dir.name, "step": last.step, "lag": lag, **read(last, scorers, newest, groups)})
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The means over runs as a table in Markdown."""
    head = [f"{title}, {arm}" for title in SHOWN.values() for arm in ARMS]
    lines = ["| steps behind | " + " | ".join(head) + " |", "|" + " --- |" * (len(head) + 1)]
    for lag in sorted({row["lag"] for row in rows}):
        those = [row for row in rows if row["lag"] == lag]
        cells = [f"{np.mean([row[arm][name] for row in those]):.3g}" for name in SHOWN for arm in ARMS]
        lines.append(f"| {lag} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bands(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, plot.Band]]:
    """{title: {"live" or "replayed": its mean over the runs and their range, by steps behind}}."""
    found: dict[str, dict[str, plot.Band]] = {}
    for name, title in SHOWN.items():
        for arm in ARMS:
            curves = []
            for run in sorted({row["run"] for row in rows}):
                own = sorted((row["lag"], row[arm][name]) for row in rows if row["run"] == run)
                curves.append((np.array([lag for lag, _ in own]), np.array([value for _, value in own])))
            found.setdefault(f"{title}, by steps behind", {})[arm] = plot.band(curves)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, such as those of several seeds")
    parser.add_argument(
        "--lags", default="0,1,2,4,8", help="steps between the checkpoint that samples and the last one"
    )
    parser.add_argument("--prompts", type=int, default=128, help="number of prompts")
    parser.add_argument("--samples", type=int, default=4, help="number of samples of a prompt")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype of the sampler"
    )
    parser.add_argument("--out", type=Path, help="file that all figures are written to as JSON")
    parser.add_argument("--plot", type=Path, help="file that they are drawn in (.png, .svg or .pdf)")
    given = parser.parse_args(argv)
    compilation_cache.keep()
    asked = Asked(prompts=given.prompts, samples=given.samples, dtype=given.dtype)
    lags = [int(lag) for lag in given.lags.split(",")]
    rows = [row for run_dir in given.runs for row in measure(run_dir, lags, asked)]
    if given.out is not None:
        given.out.write_text(json.dumps({"sampler": asked.dtype, "rows": rows}, indent=1) + "\n")
    if given.plot is not None:
        plot.draw(bands(rows), given.plot)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
