"""Loss and gradient of every algorithm are the same however a step is split over micro-batches and devices, to 1e-9.

The learner is the package's own; its models are a table and a head in float64, with the softmax written out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_group, make_prompt, make_rollout, slow_but
from learner_cases import SFT_CASE, make_learner
from test_contracts import NAMES, build

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import unscored
from jaxrl_llm.learner.batch import Batch, to_device
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import PackedRows, Packing, Placement

VOCABULARY, WIDTH, GROUPS, MEMBERS, RESPONSE = 11, 6, 8, 3, 7
POLICY = make_learner(SFT_CASE).policy  # asked for the size of its vocabulary alone
PACKING = Packing(row_tokens=32, rows=8, sequences_per_row=4)


def forward(params: Mapping[str, Any], batch: MicroBatch) -> dict[str, dict[str, jax.Array]]:
    """Streams of models without layers: a token's hidden state depends on it and its position alone."""
    hidden = {n: jnp.tanh(p["tokens"][batch.tokens] + p["positions"][batch.positions]) for n, p in params.items()}
    logp = jax.nn.log_softmax(hidden["policy"] @ params["policy"]["head"].T)
    stats = {
        "logprob": jnp.take_along_axis(logp, jnp.maximum(batch.targets, 0)[..., None], axis=2)[..., 0],
        "entropy": -jnp.sum(jnp.exp(logp) * logp, axis=2),
        "sum_p2": jnp.sum(jnp.exp(2 * logp), axis=2),
        "teacher_divergence": jnp.sum(jnp.exp(logp) * jnp.cos(logp), axis=2),  # any number of a token
    }
    values = {n: {"value": hidden[n] @ params[n]["head"][0]} for n in params if n != "policy"}
    return {"policy": {n: jnp.where(batch.targets >= 0, x, 0.0) for n, x in stats.items()}, **values}


@dataclass(frozen=True, kw_only=True, eq=False)
class Given(Learner):
    """A learner whose parameters are the stats themselves."""

    def _read(self, params: Mapping[str, Any], batch: MicroBatch, *_: Any) -> Any:
        return {model: dict(stats) for model, stats in params.items()}, None


@pytest.fixture(scope="module", autouse=True)
def exact_and_quick_to_compile() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    sizes = {"tokens": (VOCABULARY, WIDTH), "positions": (32, WIDTH), "head": (VOCABULARY, WIDTH)}
    return {m: {n: random.normal(size=s) for n, s in sizes.items()} for m in ("policy", "critic", "reward_model")}


def learner(name: str) -> Given:
    trained = [m for m in ("critic", "reward_model") if m in build(name).needs]
    trained += [] if "reward_model" in trained else ["policy"]
    return Given(
        models=dict.fromkeys(("policy", *trained), POLICY),
        algorithm=build(name),
        optimizers=dict.fromkeys(trained, Optimizer()),
        updates=1,
    )


def members_of(kind: str) -> int:
    return {"samples": MEMBERS, "pairs": 2}.get(kind, 1)


@cache
def make_step(kind: str, greedy: bool) -> Batch:
    """A step of ragged responses in one mini-batch: samples with one reward that could not be had, pairs or single responses."""
    random, groups = np.random.default_rng(1), []
    for g in range(GROUPS):
        prompt = make_prompt(f"p{g}", random.integers(0, VOCABULARY, random.integers(1, 4)), source="s")
        roles = ["greedy" if greedy and i == 0 else "sample" for i in range(members_of(kind))]
        lengths = random.integers(2, RESPONSE + 1, len(roles))
        logprobs = lambda n: random.normal(-2, 0.3, n)  # noqa: E731
        rollouts = [
            make_rollout(
                prompt,
                random.integers(0, VOCABULARY, n),
                logprobs=logprobs(n),
                role=role,
                spans={"thought": np.arange(n) < 2},
            )
            for n, role in zip(lengths, roles)
        ]
        if kind == "samples":
            parts = {
                n: random.integers(0, 3, len(roles)) / 2 for n in ("main", "style")
            }  # 1 is enough for expert iteration
            groups.append(make_group(rollouts, parts, {"main": [(g, i) != (2, 1) for i in range(len(roles))]}))
        else:
            groups.append(unscored(rollouts, (1, -1) if kind == "pairs" else None))
    sizes = {"response_tokens": RESPONSE, "capacity": GROUPS * members_of(kind)}
    return Batch.build(groups, PACKING, minibatches=1, sources=["s"], **sizes)


def split(step: Batch, ways: int) -> Batch:
    """The step in that many micro-batches of whole groups, dealt over rows in turn."""
    prompts, responses = (list(x) for x in zip(*((r.prompt.tokens, r.tokens) for r in step.rollouts)))
    members = len(step.rollouts) // GROUPS
    order = np.random.default_rng(ways).permutation(GROUPS)
    micro = []
    for part in np.split(order, ways):
        mine = [int(g) * members + i for g in part for i in range(members)]
        placed = Placement([mine[row :: PACKING.rows] for row in range(PACKING.rows)])
        micro.append(PackedRows.build(PACKING, placed, prompts, responses))
    return replace(step, minibatches=[micro])


def step_of(name: str) -> tuple[str, bool]:
    kind = "pairs" if "sides" in build(name).needs else build(name).learns_from
    return kind, "greedy" in build(name).needs


STEPS = {kind: [name for name in NAMES if step_of(name) == kind] for kind in sorted({step_of(n) for n in NAMES})}


def sequences_of(name: str) -> Any:
    algorithm, step = build(name), make_step(*step_of(name))
    random, shape = np.random.default_rng(2), (step.capacity, RESPONSE)
    around = lambda mean, spread: random.normal(mean, spread, shape).astype(np.float32)  # noqa: E731
    stats = {n: around(-2.4, 0.5) for n in ("old_logprobs", "ref_logprobs", "teacher_logprobs")}
    stats |= {"entropy": around(2, 0.1), "values": around(0, 1), "sum_p2": around(0.3, 0.01)}
    return step, step.sequences(stats, algorithm.controls, GROUPS)


@cache
def credits() -> dict[str, Any]:
    views = {name: sequences_of(name)[1] for name in NAMES}
    compiled = jax.jit(lambda views: {name: build(name).advantages(sequences) for name, sequences in views.items()})
    return jax.device_get(compiled(views))


@cache
def compiled() -> Any:
    """Loss and gradient of one micro-batch of every algorithm, in one program."""

    def all_gradients(params: Any, batches: dict[str, MicroBatch]) -> Any:
        found = {}
        for alike in STEPS.values():  # one step, and one pass through the models forwards and backwards
            stats, back = jax.vjp(lambda p: forward(p, batches[alike[0]]), params)  # noqa: B023  # used at once
            none = jax.tree.map(jnp.zeros_like, stats)
            metrics, by_stream = {}, []
            for name in alike:
                gradient, metrics[name] = learner(name)._slopes(stats, batches[name], {}, (0, 0))
                by_stream.append({**none, **gradient})
            (by_parameter,) = jax.vmap(back)(jax.tree.map(lambda *x: jnp.stack(x), *by_stream))
            for i, name in enumerate(alike):
                found[name] = jax.tree.map(lambda x: x[i], by_parameter), metrics[name]  # noqa: B023
        return found

    return jax.jit(all_gradients)


def gradients(micro: int, devices: int) -> dict[str, Any]:
    """{name: (gradient, metrics)} summed over `micro` micro-batches whose rows lie on `devices` devices."""
    place = Partitioner.create(MeshConfig(), jax.devices()[:devices])
    parts: list[dict[str, MicroBatch]] = [{} for _ in range(micro)]
    for name in NAMES:
        step, sequences = sequences_of(name)
        (mini,) = split(step, micro).micro_batches(sequences, credits()[name], build(name).constant, place)
        for part, batch in zip(parts, mini, strict=True):
            part[name] = to_device(batch, place)
    params = jax.device_put(parameters(), place.replicated)
    found = [jax.device_get(compiled()(params, part)) for part in parts]
    return jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x), *found)


@cache
def whole() -> dict[str, Any]:
    return gradients(1, 1)


@pytest.mark.parametrize(("micro", "devices"), slow_but(((4, 1), (8, 1)), [(4, 1), (8, 1), (1, 8), (2, 8)]))
def test_loss_and_gradient_do_not_depend_on_the_split(micro: int, devices: int) -> None:
    found = gradients(micro, devices)
    for name in NAMES:
        (gradient, metrics), (want, expected) = found[name], whole()[name]
        flat, wanted = (np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (gradient, want))
        assert np.linalg.norm(wanted) > 1e-3, name
        assert np.linalg.norm(flat - wanted) <= 1e-9 * np.linalg.norm(wanted), name
        np.testing.assert_allclose(metrics["loss/total"], expected["loss/total"], rtol=1e-9, atol=1e-12, err_msg=name)
