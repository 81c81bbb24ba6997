"""Random views and packed batches for the tests of the algorithms, built with NumPy alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.batch import Advantages, MicroBatch, Sequences

SIZES = (4, 3, 1, 2, 5)  # members of each group: ragged, with a group of one
TOKENS = 7


def make_sequences(seed: int = 0, sizes: Sequence[int] = SIZES, pairs: bool = False, **changes: Any) -> Sequences:
    """Sequences with ragged lengths, holes in the masks, an all-equal group, an empty sequence and NaN outside every mask.

    The last row is padding: no tokens, not valid. With `pairs`, every group is a preferred and a rejected answer.
    """
    rng = np.random.default_rng(seed)
    sizes = (2, 2, 2, 2) if pairs else tuple(sizes)
    group = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), [0]])
    total = len(group)
    length = rng.integers(3, TOKENS + 1, total)
    mask = np.arange(TOKENS)[None, :] < length[:, None]
    mask[2, 1] = False  # the answer of an environment
    mask[-1] = False
    reward = rng.normal(size=total)
    if not pairs:
        reward[group == 1] = 0.1  # nothing to prefer
    logprob = -rng.gamma(2.0, 0.5, (total, TOKENS))
    side = np.where(np.arange(total) % 2 == 0, 1, -1) * (np.arange(total) < total - 1) if pairs else np.zeros(total)

    def placed(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.where(mask, x, np.nan), jnp.float32)

    sequences = Sequences(
        reward=jnp.asarray(reward, jnp.float32),
        parts={
            "main": jnp.asarray(reward, jnp.float32),
            "style": jnp.asarray(rng.integers(0, 3, total), jnp.float32),
        },
        valid=jnp.asarray(np.arange(total) < total - 1),
        greedy=jnp.zeros(total, bool),
        truncated=jnp.zeros(total, bool),
        group=jnp.asarray(group, jnp.int32),
        source=jnp.zeros(total, jnp.int32),
        side=jnp.asarray(side, jnp.int32),
        mask=jnp.asarray(mask),
        spans={"thought": jnp.asarray(mask & (np.arange(TOKENS) < 2))},
        sampler_logprobs=placed(logprob + rng.normal(0, 0.5, logprob.shape)),
        old_logprobs=placed(logprob),
        entropy=placed(rng.uniform(0, 2, logprob.shape)),
        ref_logprobs=placed(logprob + rng.normal(0, 0.3, logprob.shape)),
        sum_p2=placed(np.exp(logprob) ** 2 + rng.uniform(0, 0.2, logprob.shape)),
        uniform_logprob=placed(logprob - 1.0),
        values=placed(rng.normal(size=logprob.shape)),
        teacher_logprobs=placed(logprob + rng.normal(0, 0.3, logprob.shape)),
        controls={},
        groups=len(sizes),
    )
    return sequences if not changes else Sequences(**{**sequences.__dict__, **changes})


def pack(x: Any, rows: Sequence[Sequence[int]], width: int, fill: float) -> jax.Array:
    """[S, T] stats of the named sequences, side by side in rows of `width` tokens."""
    x = np.asarray(x)
    packed = np.full((len(rows), width), fill, x.dtype)
    for row, members in zip(packed, rows):
        for place, member in enumerate(members):
            row[place * TOKENS : (place + 1) * TOKENS] = x[member]
    return jnp.asarray(packed)


def make_batch(
    sequences: Sequences, assigned: Advantages, constant: float, rows: Sequence[Sequence[int]] | None = None
) -> MicroBatch:
    """The packed micro-batch of the named sequences (all, one a row, by default); counts are those of all
    sequences."""
    rows = [[i] for i in range(len(sequences.group))] if rows is None else rows
    width = TOKENS * max(len(r) for r in rows)
    members = [i for row in rows for i in row]
    place = np.zeros(len(sequences.group), np.int32)
    place[members] = np.arange(len(members))

    def placed(x: Any) -> Any:
        return None if x is None else pack(x, rows, width, np.nan)

    loss_mask = np.asarray(assigned.loss_mask)
    zeros = jnp.zeros((len(rows), width), jnp.int32)
    live = loss_mask.any(1)
    counts = {
        "tokens": loss_mask.sum(),
        "read": loss_mask[members].sum(),
        "sequences": live.sum(),
        "pairs": (live & (np.asarray(sequences.side) == 1)).sum(),
        "constant": live.sum() * constant,
        "one": 1.0,
    }
    return MicroBatch(
        tokens=zeros,
        targets=zeros,
        positions=zeros,
        segments=zeros,
        sequence=pack(np.repeat(place[:, None], TOKENS, 1), rows, width, 0),
        mask=pack(loss_mask, rows, width, False),
        sampler_logprobs=placed(sequences.sampler_logprobs),
        old_logprobs=placed(sequences.old_logprobs),
        ref_logprobs=placed(sequences.ref_logprobs),
        old_values=placed(sequences.values),
        advantages=placed(assigned.advantages),
        returns=placed(assigned.returns),
        weights=placed(assigned.weights),
        aux={name: pack(x, rows, width, 0) for name, x in assigned.aux.items()},
        group=sequences.group[jnp.asarray(members)],
        side=sequences.side[jnp.asarray(members)],
        counts={name: jnp.asarray(x, jnp.float32) for name, x in counts.items()},
    )


def make_outputs(sequences: Sequences, seed: int = 1, distance: float = 0.2) -> dict[str, dict[str, jax.Array]]:
    """[S, T] stats of the policy, the critic and a reward model now; log-probs lie around those before the update."""
    rng = np.random.default_rng(seed)
    old = np.asarray(sequences.old_logprobs)
    policy = {
        "logprob": (old + distance * rng.normal(size=old.shape)).astype(np.float32),
        "entropy": sequences.entropy,
        "sum_p2": sequences.sum_p2,
        "uniform_logprob": sequences.uniform_logprob,
        "teacher_divergence": jnp.where(jnp.isnan(sequences.entropy), jnp.nan, 0.1 + 0.3 * sequences.entropy),
    }
    values = np.asarray(sequences.values)
    critic = {"value": (values + 0.3 * rng.normal(size=old.shape)).astype(np.float32)}
    return jax.tree.map(jnp.asarray, {"policy": policy, "critic": critic, "reward_model": critic})


def total_loss(algorithm: Any, outputs: Mapping[str, Any], batch: MicroBatch) -> jax.Array:
    """What the learner minimises: every term over its global count."""
    terms, _ = algorithm.loss(outputs, batch)
    return sum((x / batch.counts[name] for x, name in terms.values()), start=jnp.zeros(()))


def value_and_gradient(algorithm: Any, outputs: Mapping[str, Any], batch: MicroBatch) -> tuple[float, np.ndarray]:
    """The loss, and its gradient [B, T] by the policy's log-probs, its divergence from a teacher where that is the loss, or by the values of the reward model it trains."""
    model, name = ("reward_model", "value") if "reward_model" in algorithm.needs else ("policy", "logprob")
    name = "teacher_divergence" if "teacher_divergence" in algorithm.needs else name
    value, gradient = _value_and_gradient(outputs, batch, algorithm=algorithm, model=model, name=name)
    return float(value), np.asarray(gradient)


@partial(jax.jit, static_argnames=("algorithm", "model", "name"))
def _value_and_gradient(outputs: Any, batch: MicroBatch, *, algorithm: Any, model: str, name: str) -> Any:
    def f(stat: jax.Array) -> jax.Array:
        return total_loss(algorithm, {**outputs, model: {**outputs[model], name: stat}}, batch)

    return jax.value_and_grad(f)(outputs[model][name])


def numeric_gradient(
    f: Callable[[np.ndarray], float], x: np.ndarray, mask: np.ndarray, step: float = 1e-6
) -> np.ndarray:
    """Central differences in float64 at the masked entries, 0 elsewhere."""
    step, gradient = 1e-6, np.zeros(x.shape)
    for index in zip(*np.nonzero(mask)):
        above, below = x.astype(np.float64), x.astype(np.float64)
        above[index] += step
        below[index] -= step
        gradient[index] = (f(above) - f(below)) / (2 * step)
    return gradient
