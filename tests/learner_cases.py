"""A tiny policy with a step of rollouts, and what learning from them must give, in float64 from the definitions.

The reference runs one padded sequence at a time through a decoder written out with einsum, takes log_softmax of the full
logits, and lets JAX differentiate the objective as the papers state it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from builders import make_group, make_prompt, make_rollout

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.distributed import padding
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Rollout
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import PackedRows, Packing, Placement
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3

MODEL = Qwen3(
    vocabulary_size=32, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=48, tied=True, init_std=0.2
)
PACKING = Packing(row_tokens=32, rows=8, sequences_per_row=2)
GROUPS, MEMBERS, PROMPT, RESPONSE = 4, 4, 5, 11
TEMPERATURE = 0.8
LEARNING_RATE, B1, CLIP = 1e-3, 0.9, 0.5
GRPO_CASE = GRPO(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.01)
SFT_CASE = SFT()


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """The tree's arrays on the host by path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_gradients_agree(got: Any, want: Any, relative: float = 1e-5) -> None:
    """Every leaf is within `relative` of its largest entry, or of a hundredth of the tree's largest."""
    found, expected = leaves(got), leaves(want)
    assert found.keys() == expected.keys()
    largest = max(float(np.abs(x).max()) for x in expected.values())
    assert largest > 0
    for path, x in expected.items():
        scale = max(float(np.abs(x).max()), 0.01 * largest)
        np.testing.assert_allclose(found[path], x, rtol=0, atol=relative * scale, err_msg=path)


@cache
def make_rollouts() -> list[Rollout]:
    """Four responses to each of four prompts: ragged, two with an environment's words, one of them greedy."""
    rng = np.random.default_rng(0)
    rollouts = []
    for g in range(GROUPS):
        prompt = make_prompt(f"p{g}", rng.integers(0, 32, rng.integers(1, PROMPT + 1)), source="s")
        for i in range(MEMBERS):
            n = int(rng.integers(1, RESPONSE + 1)) if i else RESPONSE
            mask = (np.arange(n) < 3) | (np.arange(n) > 5) if i == 0 and g < 2 else np.ones(n, bool)
            role = "greedy" if (g, i) == (2, 3) else "sample"
            rollouts.append(make_rollout(prompt, rng.integers(0, 32, n), mask=mask, role=role))
    return rollouts


@cache
def make_rewards() -> np.ndarray:
    """A reward of each rollout; one could not be had."""
    rewards = np.random.default_rng(1).normal(size=GROUPS * MEMBERS)
    rewards[6] = np.nan
    return rewards


@cache
def make_stats() -> dict[str, np.ndarray]:
    """Old, reference and sampler log-probs, [S, RESPONSE], around the policy's own: some ratios are clipped."""
    rng, (logprob, _) = np.random.default_rng(2), expected_streams()
    names = {"old_logprobs": 0.3, "ref_logprobs": 0.3, "sampler_logprobs": 0.8}
    return {n: (logprob + rng.normal(0, scale, logprob.shape)).astype(np.float32) for n, scale in names.items()}


@cache
def make_batch(rows: int = PACKING.rows) -> Batch:
    """The step in one micro-batch of `rows` rows, with two sequences to spare in the batch."""
    sampler = make_stats()["sampler_logprobs"]
    rollouts = [replace(r, sampler_logprobs=x[: len(r.tokens)]) for r, x in zip(make_rollouts(), sampler)]
    groups = []
    for start in range(0, len(rollouts), MEMBERS):
        rewards = make_rewards()[start : start + MEMBERS]
        groups.append(make_group(rollouts[start : start + MEMBERS], {"r": rewards}, {"r": np.isfinite(rewards)}))
    sizes = {"response_tokens": RESPONSE, "capacity": GROUPS * MEMBERS + 2}
    return Batch.build(groups, replace(PACKING, rows=rows), minibatches=1, sources=["s"], **sizes)


def split(members: Sequence[Sequence[int]]) -> Batch:
    """The step with the named sequences in each micro-batch, dealt over its rows in turn."""
    prompts, responses = (list(column) for column in zip(*((r.prompt.tokens, r.tokens) for r in make_rollouts())))
    dealt = [
        Placement([[int(i) for i in part[row :: PACKING.rows]] for row in range(PACKING.rows)]) for part in members
    ]
    mini = [PackedRows.build(PACKING, placement, prompts, responses) for placement in dealt]
    return replace(make_batch(), minibatches=[mini])


def make_learner(algorithm: Any, mesh: MeshConfig = MeshConfig(), devices: int = 1, **changes: Any) -> Learner:  # noqa: B008
    """GRPO samples at TEMPERATURE and is never clipped; SFT is clipped to CLIP."""
    policy = Policy(MODEL, Partitioner.create(mesh, jax.devices()[:devices]))
    sft = isinstance(algorithm, SFT)
    optimizer = Optimizer(learning_rate=LEARNING_RATE, b1=B1, max_grad_norm=CLIP if sft else 0.0)
    fields = {"temperature": 1.0 if sft else TEMPERATURE, "updates": 10, "max_segments": PACKING.sequences_per_row}
    return Learner(models={"policy": policy}, algorithm=algorithm, optimizers={"policy": optimizer}, **fields | changes)


@cache
def host_params() -> Any:
    policy = Policy(MODEL, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    return jax.tree.map(np.asarray, policy.init(jax.random.key(0)))


def fresh_state(learner: Learner) -> TrainState:
    """A state of its own buffers, with the same parameters on every mesh."""
    place = lambda x, like: jax.device_put(padding.filled(np.array(x), like.shape), like.sharding)  # noqa: E731
    return learner.init({"policy": jax.tree.map(place, host_params(), learner.policy.abstract())})


def batches_of(learner: Learner, batch: Batch) -> list[MicroBatch]:
    """The step's micro-batches on the learner's devices."""
    known = ("old_logprobs", "ref_logprobs") if learner.algorithm.learns_from == "samples" else ()
    stats = {n: batch.tokenwise(list(make_stats()[n])) for n in known}
    sequences = batch.sequences(stats, learner.algorithm.controls, GROUPS)
    assigned = jax.device_get(learner.advantages(sequences))
    (mini,) = batch.micro_batches(sequences, assigned, learner.algorithm.constant, learner.partitioner)
    return mini


def first_gradient(state: TrainState) -> Any:
    """The gradient of a state's only update, as the first moment kept it: mu = (1 - b1) g."""
    return jax.tree.map(lambda mu: np.asarray(mu) / (1 - B1), optax.tree_utils.tree_get(state.moments["policy"], "mu"))


# -- the reference -----------------------------------------------------------------------------------------------------


def padded() -> dict[str, np.ndarray]:
    """Sequences unpacked: tokens [S, PROMPT + RESPONSE], the place of each response token, and its mask."""
    rollouts = make_rollouts()
    out = {
        "tokens": np.zeros((len(rollouts), PROMPT + RESPONSE), np.int32),
        "place": np.ones((len(rollouts), RESPONSE), np.int32),
        "there": np.zeros((len(rollouts), RESPONSE), bool),
        "mask": np.zeros((len(rollouts), RESPONSE), bool),
    }
    for i, r in enumerate(rollouts):
        p, n = len(r.prompt.tokens), len(r.tokens)
        out["tokens"][i, : p + n] = [*r.prompt.tokens, *r.tokens]
        out["place"][i, :n] = np.arange(p, p + n)
        out["there"][i, :n], out["mask"][i, :n] = True, r.mask
    return out


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + MODEL.norm_epsilon)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [T, heads, C]: the pairs (i, i + C / 2) as complex numbers."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[0])[:, None] * MODEL.rope_theta ** (-jnp.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, None, :]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
    """[T, V] of one sequence."""
    x = params["embedding"][tokens]
    causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
    for index in range(MODEL.layers):
        layer = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023  # used at once
        at, h = layer["attention"], norm(x, layer["attention_norm"]["scale"])
        q, k, v = (jnp.einsum("td,dhc->thc", h, at[n]["kernel"]) for n in ("query", "key", "value"))
        q, k = rotated(norm(q, at["query_norm"]["scale"])), rotated(norm(k, at["key_norm"]["scale"]))
        k, v = (jnp.repeat(z, MODEL.heads // MODEL.kv_heads, axis=1) for z in (k, v))
        scores = jnp.where(causal, jnp.einsum("thc,shc->hts", q, k) / np.sqrt(MODEL.head_width), -jnp.inf)
        x = x + jnp.einsum("hts,shc,hcd->td", jax.nn.softmax(scores, axis=-1), v, at["output"])
        h = norm(x, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(h @ layer["mlp"]["gate"]) * (h @ layer["mlp"]["up"])) @ layer["mlp"]["down"]
    return norm(x, params["norm"]["scale"]) @ params["embedding"].T


def streams_of(params: Any, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every response token, [S, RESPONSE]."""
    data = padded()
    logits = jax.lax.map(partial(logits_of, params), jnp.asarray(data["tokens"])) / temperature
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), data["place"][:, :, None] - 1, axis=1)
    chosen = np.take_along_axis(data["tokens"], data["place"], axis=1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    logprob = jnp.take_along_axis(logp, chosen[:, :, None], axis=2)[..., 0]
    return jnp.where(data["there"], logprob, 0.0), jnp.where(data["there"], entropy, 0.0)


def advantages_and_counted() -> tuple[np.ndarray, np.ndarray]:
    """GRPO's advantage of each sequence, 0 for the greedy and the invalid one, and which sequences count."""
    reward, advantage = make_rewards(), np.zeros(GROUPS * MEMBERS)
    counted = np.isfinite(reward) & [r.role == "sample" for r in make_rollouts()]
    for start in range(0, GROUPS * MEMBERS, MEMBERS):
        rows = [i for i in range(start, start + MEMBERS) if counted[i]]
        advantage[rows] = (reward[rows] - reward[rows].mean()) / (reward[rows].std(ddof=1) + 1e-6)
    return advantage, counted


def grpo_objective(params: Any, stats: dict[str, np.ndarray]) -> jax.Array:
    """PPO's clipped surrogate with truncated importance weights, k3 and entropy; means over tokens, then sequences."""
    advantage, counted = advantages_and_counted()
    mask = padded()["mask"] & counted[:, None]
    logprob, entropy = streams_of(params, TEMPERATURE)
    ratio = jnp.exp(logprob - stats["old_logprobs"])
    gain = jnp.minimum(advantage[:, None] * ratio, advantage[:, None] * jnp.clip(ratio, 1 - 0.2, 1 + 0.28))
    weight = np.minimum(np.exp(stats["old_logprobs"] - stats["sampler_logprobs"]), 2.0)
    d = stats["ref_logprobs"] - logprob
    token = -weight * gain + 0.1 * (jnp.exp(d) - 1 - d) - 0.01 * entropy
    return jnp.sum(jnp.sum(jnp.where(mask, token, 0.0), axis=1) / np.maximum(mask.sum(1), 1)) / counted.sum()


def sft_objective(params: Any) -> jax.Array:
    """The mean negative log-prob of the tokens that are learned from."""
    mask = padded()["mask"] & advantages_and_counted()[1][:, None]
    return -jnp.sum(jnp.where(mask, streams_of(params, 1.0)[0], 0.0)) / mask.sum()


@cache
def expected(name: str) -> tuple[float, Any]:
    """The objective and its gradient in float64, by name: "grpo" or "sft"."""
    stats = {n: x.astype(np.float64) for n, x in make_stats().items()}
    objective = {"grpo": partial(grpo_objective, stats=stats), "sft": sft_objective}[name]
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), host_params())
        value, gradient = jax.jit(jax.value_and_grad(objective))(params)
        return float(value), jax.tree.map(np.asarray, gradient)


@cache
def expected_streams() -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies at TEMPERATURE in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), host_params())
        logprob, entropy = jax.jit(partial(streams_of, temperature=TEMPERATURE))(params)
        return np.asarray(logprob), np.asarray(entropy)
