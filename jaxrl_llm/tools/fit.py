"""Chooses settings that fit a device: rows of a micro-batch, rematerialisation, and where and in what dtype moments and gradients are.

The account adds the state's own shapes, memory beside it (the reference, the sampler's copy of the weights), the gradient of one
micro-batch beside the sum of several, and the activations by the cost model, which was compared with measured peaks; or, where these take
more, the moments that an offloaded optimizer brings to the device. Among the settings that fit, those that change least are preferred:
moments in float32 on the device, then the first moment in bfloat16, then both moments on the host, then a micro-batch's gradient in
bfloat16 too; among these, those of about the least predicted time. As much as the largest array of a gradient stays free: a program's
temporaries are one piece of memory, and what is free lies in several.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.learner import example
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import rested
from jaxrl_llm.models.architecture import stack_of
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.samplers.embedded.room import Capacity, taken_bytes
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import memory
from jaxrl_llm.tools.planning import cost_model
from jaxrl_llm.tools.planning.chips import CHIPS, DEVICES, GIB, Device
from jaxrl_llm.train.build import learner_of
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage

USABLE = 0.92  # share of a device's memory that JAX takes; the rest is for libraries
REMATS = ("none", "dots", "gate", "projections", "attention", "full")
# (dtype of the first moment, whether moments are on the host, dtype of a micro-batch's gradient), in order of increasing change.
KEPT = (("float32", False, None), ("bfloat16", False, None), ("float32", True, None), ("float32", True, "bfloat16"))
GRADIENTS = "train.Optimizer.gradients_dtype"
MOST_ROWS = 4096
CLOSE = 1.1  # factor of the least predicted time within which the setting that recomputes least is taken


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings that fit a device.

    Attributes:
      rows: rows of a micro-batch of each stage.
      remat: what the backward pass recomputes.
      moments: dtype of the first moment.
      offload: whether the moments are on the host.
      gradients: dtype of a micro-batch's gradient; None leaves the run's own.
      needed: bytes that the fullest stage takes of a device.
    """

    rows: tuple[int, ...]
    remat: str
    moments: str
    offload: bool
    gradients: str | None
    needed: float


def here() -> Device:
    """Returns the device of this process; a CPU gets an equal share of the machine's memory."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:  # the memory that JAX was given
        return Device(device.device_kind, limit / USABLE)
    memory_here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(f"{device.device_kind} of this machine", memory_here / jax.local_device_count())


def named(name: str | None) -> Device:
    """Returns a device of DEVICES by name, or "NAME=GIB"; None is this process's device. Raises ValueError for other names."""
    if name is None:
        return here()
    if found := re.fullmatch(r"([\w-]+)=([\d.]+)", name):
        return Device(found[1], float(found[2]) * GIB)
    if name.lower() not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, or NAME=GIB such as mine=48 (got {name!r})")
    return DEVICES[name.lower()]


# -- the account -------------------------------------------------------------------------------------------------------


def beside(run: Run, stage: Stage, policy: Any) -> int:
    """Returns the bytes on a device beside a stage's state: the embedded sampler's copy of the weights, and one slot per shard of its cache."""
    sampler = run.sampler
    if not (stage.samples and isinstance(sampler, EmbeddedSampler)) or sampler.devices:
        return 0
    slots = Capacity(slots=policy.partitioner.batch_shards, length=run.max_length, stop_ids=0, penalised=False)
    return memory.copy(policy, sampler, stage) + taken_bytes(policy.plain, slots, sampler.cache)


def activations(setting: cost_model.Setting, tokens: int, dtype: str) -> float:
    """Returns the bytes of an update's activations and working memory for `tokens` tokens per device."""
    without = setting.weights / setting.shards * (8 + setting.moments)
    return (cost_model.memory_bytes(setting, tokens) - without) * (2 if dtype == "float32" else 1)


def slopes(learner: Learner, *, copied: bool) -> int:
    """Returns the bytes of one micro-batch's gradient, and of what a gradient in bfloat16 is made with.

    That is the float32 sum of the embedding's rows, and, with `copied`, a rounded copy of the layers' float32 weights, which a pass that
    recomputes nothing keeps.
    """
    found = 0
    for name, tree in learner.gradients.items():
        stored, narrow = learner.abstract.params[name], rested(tree, learner.optimizers[name].slopes_dtype)
        smaller = lambda part, than, narrow=narrow: memory.size(narrow[part]) < memory.size(than[part])  # noqa: E731
        found += memory.size(narrow)
        found += sum(memory.size(tree[part]) for part in tree if part == "embedding" and smaller(part, tree))
        layers = [part for part in tree if copied and stack_of(part) is not None and smaller(part, stored)]
        found += sum(memory.size(narrow[part]) for part in layers)
    return found


def setting_of(policy: Any, stage: Stage, remat: str) -> cost_model.Setting:
    """Returns the cost model's settings of a stage."""
    optimizer = stage.optimizer
    widths = (optimizer.moments_dtype, optimizer.second_moment_dtype)
    moments = 0 if optimizer.offload else sum({"float32": 4, "bfloat16": 2}[w] for w in widths)
    unrolled = policy.unroll >= policy.architecture.layers
    ways = {axis: policy.partitioner.axis_sizes[axis] for axis in ("fsdp", "expert")}
    return cost_model.Setting(sizes=policy.architecture, remat=remat, unrolled=unrolled, moments=moments, **ways)


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """What an update of a stage takes of a device, by the rows of its micro-batches and by what it recomputes; shapes are traced once.

    Attributes:
      run, stage, policy: what is counted.
    """

    run: Run
    stage: Stage
    policy: Any

    def needed(self, remat: str, rows: int) -> float:
        """Returns all bytes of a device."""
        return self.held(rows) + self.working(remat, rows)

    def held(self, rows: int) -> int:
        """Returns the bytes of the state and of what is beside it; sums of several micro-batches are in float32."""
        return self._held(example.rows_wanted(self.stage) > rows)

    def working(self, remat: str, rows: int) -> float:
        """Returns the bytes beside the state: the program of a gradient, or moments that come to the device where these take more."""
        own = self._slopes(remat == "none") if example.rows_wanted(self.stage) > rows else 0
        setting, tokens = setting_of(self.policy, self.stage, remat), _tokens(self.stage, rows, self.policy)
        return max(self._coming, own + activations(setting, tokens, self.policy.compute_dtype))

    @functools.cached_property
    def _learner(self) -> Learner:
        return learner_of(self.stage, self.policy, 0)

    @functools.cached_property
    def _coming(self) -> int:
        return memory.visiting(self._learner) - memory.size(self._learner.gradients)  # the state counts all gradients

    @functools.cached_property
    def _slopes(self) -> Callable[[bool], int]:
        return functools.cache(lambda copied: slopes(self._learner, copied=copied))

    @functools.cached_property
    def _held(self) -> Callable[[bool], int]:
        @functools.cache
        def of(several: bool) -> int:
            rows = 1 if several else example.rows_wanted(self.stage)
            at = replace(self.stage, packing=replace(self.stage.packing, rows=rows, tail=0))
            return sum(memory.state(at, self.policy).values()) + beside(self.run, at, self.policy)

        return of


def needed(run: Run, policy: Any) -> float:
    """Returns the bytes that the fullest stage of a run takes of a device with its present settings, by the account above."""
    found = (Demand(run=run, stage=s, policy=policy).needed(policy.remat, s.packing.rows) for s in run.stages)
    return max(found, default=0.0)


def room(run: Run, policy: Any, device: Device) -> float:
    """Returns the bytes of a device that a run may need: what JAX takes, less the largest array of a gradient in float32."""
    trees = [learner_of(stage, policy, 0).gradients for stage in run.stages]
    return USABLE * device.bytes - max(memory.size(leaf) for leaf in jax.tree.leaves(trees))


# -- the choice --------------------------------------------------------------------------------------------------------


def choose(run: Run, device: Device) -> Choice | None:
    """Chooses settings for a run on a device; returns None where none of those tried fits. Equal runs and devices give equal choices."""
    policy = run.policy.policy(run.partitioner())
    most_bytes = room(run, policy, device)
    # Gradients in bfloat16 are refused of others.
    rounds = policy.compute_dtype == "bfloat16" and not isinstance(policy, AdaptedPolicy)
    for moments, offload, gradients in KEPT if rounds else KEPT[:-1]:
        change = functools.partial(replace, moments_dtype=moments, offload=offload)
        change = functools.partial(change, gradients_dtype=gradients) if gradients else change
        demands = [Demand(run=run, stage=replace(s, optimizer=change(s.optimizer)), policy=policy) for s in run.stages]
        found: list[tuple[float, Choice]] = []
        for remat in REMATS:
            fitting = [_rows(demand, remat, most_bytes) for demand in demands]
            if all(fitting):
                pairs = list(zip(demands, fitting, strict=True))
                most = max(demand.needed(remat, rows) for demand, rows in pairs)
                seconds = sum(_seconds(d.stage, policy, remat, rows) * d.stage.updates for d, rows in pairs)
                choice = Choice(
                    rows=tuple(fitting), remat=remat, moments=moments, offload=offload, gradients=gradients, needed=most
                )
                found.append((seconds, choice))
        if found:
            least = min(seconds for seconds, _ in found)
            return next(choice for seconds, choice in found if seconds <= CLOSE * least)
    return None


def _tokens(stage: Stage, rows: int, policy: Any) -> int:
    return rows // policy.partitioner.batch_shards * stage.packing.row_tokens


def _rows(demand: Demand, remat: str, most: float) -> int:
    """Returns the most rows, shards x 2^k and no more than a mini-batch fills, that fit; 0 where one row per shard does not."""
    tried = [demand.policy.partitioner.batch_shards]
    while tried[-1] < min(example.rows_wanted(demand.stage), MOST_ROWS):
        tried.append(2 * tried[-1])
    # Rows that hold a whole mini-batch need no second gradient, and may fit where half of them do not.
    return max((rows for rows in tried if demand.needed(remat, rows) <= most), default=0)


def _seconds(stage: Stage, policy: Any, remat: str, rows: int) -> float:
    """Predicts the seconds of an update by one chip's rates, which order the settings on any device."""
    length = stage.max_prompt_tokens + stage.response_tokens
    times = math.ceil(example.rows_wanted(stage) / rows)
    setting, tokens = setting_of(policy, stage, remat), _tokens(stage, rows, policy)
    return sum(cost_model.update_seconds(CHIPS["h200"], setting, tokens, length, times).values())


# -- in words ----------------------------------------------------------------------------------------------------------


def lines(run: Run, config: str, choice: Choice) -> list[str]:
    """Writes the choice as gin lines; the last stage's rows are ROWS where the configuration reads it."""
    *others, last = zip(run.stages, choice.rows, strict=True)
    name = "ROWS" if re.search(r"%ROWS\b", config) else "train.Packing.rows"
    return [
        f"{name} = {last[1]}",
        *(f"{stage.name}/train.Packing.rows = {rows}" for stage, rows in others),
        f"sources.PolicySource.remat = {choice.remat!r}",
        f"train.Optimizer.moments_dtype = {choice.moments!r}",
        f"train.Optimizer.offload = {choice.offload}",
        *([f"{GRADIENTS} = {choice.gradients!r}"] if choice.gradients else ()),
    ]


def fitted(run: Run, config: str, device: Device) -> Iterator[str]:
    """Yields the settings that `plan --fit` prints.

    Raises:
      MemoryError: none of the settings fits; the message says what takes the memory.
    """
    choice = choose(run, device)
    if choice is None:
        raise MemoryError(f"{_too_small(run, device)}; {OTHERWISE}")
    yield f"# {device.name}: {choice.needed / GIB:.1f} of {device.bytes / GIB:.1f} GiB"
    yield from lines(run, config, choice)


OTHERWISE = (
    "no rows, remat and moments fit: spread over more devices (train.MeshConfig.fsdp), train adapters (gin/adapters/lora.gin), take a "
    "smaller model, or lower PROMPT_LIMIT, RESPONSE_LIMIT and ROW_TOKENS"
)


def _too_small(run: Run, device: Device, takes: float | None = None) -> str:
    policy = run.policy.policy(run.partitioner())
    held = max(sum(memory.state(s, policy).values()) + beside(run, s, policy) for s in run.stages)
    amount = f"about {takes / GIB:.1f} GiB" if takes else f"{held / GIB:.1f} GiB before any activation"
    return f"the run does not fit: it takes {amount} a device, and {device.name} has {device.bytes / GIB:.1f} GiB"


@dataclass(frozen=True)
class Verdict:
    """The message on a run that does not fit.

    Attributes:
      text: one line, with the settings that would fit.
      certain: whether the run's state alone exceeds the device's memory.
    """

    text: str
    certain: bool


def verdict(run: Any, config: str, device: Device) -> Verdict | None:
    """Tests, before anything is compiled, whether a run fits a device; returns None where it does, or where it is not a training run."""
    if not isinstance(run, Run):
        return None
    policy = run.policy.policy(run.partitioner())
    takes = needed(run, policy)
    if takes <= room(run, policy, device):
        return None
    choice = choose(run, device)
    held = max(sum(memory.state(s, policy).values()) + beside(run, s, policy) for s in run.stages)
    way = OTHERWISE if choice is None else "these settings fit: " + "; ".join(lines(run, config, choice))
    return Verdict(f"{_too_small(run, device, takes)}; {way}", held > device.bytes)


# -- rows = 'auto' -----------------------------------------------------------------------------------------------------


def bindings_of(run: Run, config: str) -> Sequence[str]:
    """Returns the bindings for a run whose rows are 'auto': those of its folder where it has begun, else those chosen for this device.

    Raises:
      MemoryError: none of the settings fits.
    """
    shards = run.partitioner().batch_shards
    stages = [replace(s, packing=replace(s.packing, rows=shards)) for s in run.stages]  # a number in place of 'auto'
    chosen = list(fitted(replace(run, stages=stages), config, here()))[1:]
    file = Path(run.run_dir) / "config.gin"
    if not file.is_file():
        return chosen
    text = file.read_text()
    always = [name for name in (line.partition(" = ")[0] for line in chosen) if name != GRADIENTS]
    before = [found[0] for n in always if (found := re.search(rf"^{re.escape(n)} = .*$", text, re.MULTILINE))]
    if len(before) < len(always):
        return chosen
    own = re.search(rf"^{re.escape(GRADIENTS)} = .*$", text, re.MULTILINE)
    return [*before, own[0]] if own else before
