"""Tables of the cost model: a run's step on fleets of chips, and simulated beside measured figures."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools.planning import cost_model
from jaxrl_llm.tools.planning.chips import CHIPS, GIB
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage

ASSUMED = """measured     rates of one H200 (1.5B updates, scoring and embedded sampling); compared with 2 and 4 GPUs and with 0.5B and 7B
assumed      {length} tokens of response in the mean, full rows; half of all exchanges behind computation; links {links};
             prices {prices} dollars a chip and hour; rewards, publication and evaluation take no time
extrapolated rows marked *: other chips take the H200's shares of their own peaks, and more than {most} chips were not run"""
HEAD = (
    "chip   chips  fsdp x data  rows  sample s  score s  update s   step s  sampler:learner  GiB a chip  dollars a step"
)


def setting_of(run: Run, stage: Stage) -> cost_model.Setting:
    """Returns the cost model's settings of a run's model and optimizer."""
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
      ValueError: no stage of the run samples, or the sampler has devices of its own.
    """
    stage = next((stage for stage in run.stages if stage.samples), None)
    if own := getattr(run.sampler, "devices", 0):
        raise ValueError(
            f"the simulator has all chips learn and sample in turn (got embedded.EmbeddedSampler.devices = {own}): set it to 0"
        )
    if stage is None:
        raise ValueError("no stage of this run samples: the simulator is of RL steps")
    length = response or stage.settings.max_tokens
    step = {
        "sequences": stage.sequences, "prompt": stage.max_prompt_tokens, "response": length,
        "row_tokens": stage.packing.row_tokens, "updates": stage.minibatches * stage.epochs,
        "forwards": int(stage.old_from in ("learner", "measured")) + int("reference" in stage.needs),
        "slots": run.sampler.slots if isinstance(run.sampler, EmbeddedSampler) else 512,
    }  # fmt: skip
    setting, known = setting_of(run, stage), CHIPS
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
        chip = CHIPS["h200"]
        if row["work"] == "update":
            seconds = sum(cost_model.update_seconds(chip, setting, tokens, length).values())
            gib = cost_model.memory_bytes(setting, tokens) / GIB
            room = f"  {row['peak_gib']:7.2f} GiB, simulated {gib:7.2f} ({gib / row['peak_gib'] - 1:+.1%})"
        else:
            seconds, room = cost_model.score_seconds(chip, setting, tokens, length), ""
        what = f"{row['work']} {row['model']} {row['rows']} x {row['row_tokens']}, {row['remat']}, {row['devices']} GPU"
        yield f"{what:<52} {row['s']:.4f} s, simulated {seconds:.4f} ({seconds / row['s'] - 1:+.1%}){room}"
