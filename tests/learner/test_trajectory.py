"""A rollout of several branches has one advantage, is one sequence of the loss, and learns each sampled token once.

The reference takes each branch as a sequence of its own through the float64 decoder of `learner_cases`, and joins the log-probs of the
tokens that a branch learns from into one trajectory; objectives are written out from the papers.
"""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import make_group, make_prompt, make_rollout
from learner_cases import (
    MODEL,
    TEMPERATURE,
    assert_gradients_agree,
    first_gradient,
    fresh_state,
    host_params,
    logits_of,
    make_learner,
)

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.gspo import GSPO
from jaxrl_llm.algorithms.ppo import PPO
from jaxrl_llm.algorithms.rloo import RLOO
from jaxrl_llm.experience import Branch, Group, Rollout, Turn
from jaxrl_llm.learner.batch import Batch, row, stretches
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.score import means_of_rollouts
from jaxrl_llm.learner.trajectory import bounded

REWARDS = ((1.0, 0.25, -9.0), (0.5, 2.0))  # by group; the third rollout of the first group is invalid
INVALID = 2
PACKING = Packing(row_tokens=32, rows=2, sequences_per_row=3)
RESPONSE = 8  # less than the forked rollouts need


def make_branch(seed: int, prefix: int, mask: str) -> Branch:
    """A branch of random tokens; `mask` has a "1" for each token that is learned from."""
    rng, n = np.random.default_rng(seed), len(mask)
    learned = np.array([c == "1" for c in mask], bool)
    logprobs = np.where(learned, -rng.uniform(0.5, 3, n), 0).astype(np.float32)
    ids = lambda count: rng.integers(0, MODEL.vocabulary_size, count).astype(np.int32)  # noqa: E731
    return Branch(
        prefix=ids(prefix), tokens=ids(n), sampler_logprobs=logprobs, mask=learned, versions=np.zeros(n, np.int32), finish="stop",
        turns=(Turn(start=0, end=n, call=seed),),
    )  # fmt: skip


def forked(prompt, branches: list[Branch], **fields) -> Rollout:
    last = branches[-1]
    own = {name: getattr(last, name) for name in ("tokens", "sampler_logprobs", "mask", "versions", "finish", "turns")}
    return Rollout(prompt=prompt, branches=tuple(branches), **own, **fields)


@cache
def groups() -> tuple[Group, ...]:
    """Rollouts of three, one and one branches, and of two and one; the branch "000" has nothing to learn from."""
    a, b = make_prompt("a", [1, 2, 3], source="s"), make_prompt("b", [4], source="s")
    rng = np.random.default_rng(7)
    plain = lambda prompt, n: make_rollout(prompt, rng.integers(0, 32, n), logprobs=-rng.uniform(0.5, 3, n))  # noqa: E731
    three = [make_branch(1, 3, "1110011"), make_branch(2, 3, "00000111"), make_branch(3, 5, "111100")]
    two = [make_branch(4, 2, "11"), make_branch(5, 2, "000"), make_branch(6, 9, "0110111")]
    first = [forked(a, three), plain(a, 4), replace(plain(a, 3), valid=False, error="reset: OSError")]
    second = [forked(b, two), plain(b, 6)]
    return make_group(first, {"r": REWARDS[0]}), make_group(second, {"r": REWARDS[1]})


def batch_of(packing: Packing = PACKING, kept: tuple[Group, ...] | None = None) -> Batch:
    sizes = {"response_tokens": RESPONSE, "capacity": 6, "minibatches": 1}
    return Batch.build(groups() if kept is None else kept, packing, sources=["s"], **sizes)


# -- the reference -----------------------------------------------------------------------------------------------------


def trajectories() -> list[list[Branch]]:
    return [list(r.branches) or [r.paths[0]] for g in groups() for r in g.rollouts]


def logprobs_of(params, branches: list[Branch]) -> jax.Array:
    """The log-probs of the tokens that the branches of one trajectory learn from, one after the other."""
    found = []
    for branch in branches:
        whole = np.concatenate([branch.prefix, branch.tokens])
        logp = jax.nn.log_softmax(logits_of(params, jnp.asarray(whole)) / TEMPERATURE)
        places = len(branch.prefix) + np.flatnonzero(branch.mask)
        found.append(logp[places - 1, whole[places]])
    return jnp.concatenate(found)


@jax.jit
def learned_logprobs(params) -> list[jax.Array]:
    return [logprobs_of(params, branches) for branches in trajectories()]


@jax.jit
def slope_of(params, slopes: list[jax.Array]):
    """The gradient of what has these slopes in the learned log-probs; all cases share the way through the decoder."""
    return jax.vjp(learned_logprobs, params)[1](slopes)[0]


@cache
def old_logprobs() -> list[np.ndarray]:
    """Log-probs before the update of each trajectory's learned tokens: near the policy's own, and so some ratios are clipped."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        own = [np.asarray(x) for x in learned_logprobs(params64())]
    return [(x + rng.normal(0, 0.2, x.shape)).astype(np.float32) for x in own]


def params64():
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), host_params())


def clipped(ratio, advantage, low, high):
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def relative(rewards) -> list[float]:
    """GRPO's advantage of each member that is valid."""
    known = np.array(rewards)
    return list((known - known.mean()) / (known.std(ddof=1) + 1e-6))


GRPO_ADVANTAGES = [*relative(REWARDS[0][:INVALID]), 0.0, *relative(REWARDS[1])]
RLOO_ADVANTAGES = [1.0 - 0.25, 0.25 - 1.0, 0.0, 0.5 - 2.0, 2.0 - 0.5]


@dataclass(frozen=True)
class Case:
    algorithm: object
    advantages: list[float]
    by_sequence: bool
    one_ratio: bool = False
    clip: tuple[float, float] = (0.2, 0.28)


CASES = {
    "grpo": Case(GRPO(correction=None), GRPO_ADVANTAGES, by_sequence=False),
    "sequence means": Case(GRPO(correction=None, aggregation="seq-mean-token-mean"), GRPO_ADVANTAGES, by_sequence=True),
    "rloo": Case(RLOO(correction=None), RLOO_ADVANTAGES, by_sequence=False, clip=(0.2, 0.2)),
    "gspo": Case(GSPO(correction=None), GRPO_ADVANTAGES, by_sequence=True, one_ratio=True, clip=(3e-4, 4e-4)),
}


def objective(case: Case, logprobs: list[jax.Array]) -> jax.Array:
    """What is minimised, of the learned log-probs; the invalid rollout is not there."""
    total, tokens, sequences = jnp.zeros(()), 0, 0
    for i, (own, old) in enumerate(zip(logprobs, old_logprobs(), strict=True)):
        if i == INVALID:
            continue
        log_ratio = own - old.astype(np.float64)
        ratio = jnp.exp(jnp.mean(log_ratio)) if case.one_ratio else jnp.exp(log_ratio)
        gain = clipped(ratio, case.advantages[i], *case.clip)
        total -= jnp.mean(gain) if case.by_sequence else jnp.sum(gain)
        tokens, sequences = tokens + len(old), sequences + 1
    return total / (sequences if case.by_sequence else tokens)


def old_stats(batch: Batch) -> np.ndarray:
    """The old log-probs where the sequences have the learned tokens of each trajectory."""
    out = np.zeros(batch.fields["mask"].shape, np.float32)
    for i, old in enumerate(old_logprobs()):
        out[i, batch.fields["mask"][i]] = old
    return out


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [(name, 2) for name in CASES] + [("gspo", 8)])
@pytest.mark.slow
def test_the_gradient_is_that_of_trajectories(name: str, rows: int):
    case = CASES[name]
    batch = batch_of(replace(PACKING, rows=rows))
    assert len(batch.minibatches[0]) == (2 if rows == 2 else 1)
    learner = make_learner(case.algorithm)
    sequences = batch.sequences({"old_logprobs": old_stats(batch)}, {}, 2)
    assigned = jax.device_get(learner.advantages(sequences))
    for i, advantage in enumerate(case.advantages):
        np.testing.assert_allclose(assigned.advantages[i][assigned.loss_mask[i]], advantage, rtol=1e-5)
    assert not assigned.loss_mask[INVALID].any()
    (mini,) = batch.micro_batches(sequences, assigned, learner.algorithm.constant, learner.partitioner)
    state, metrics = learner.update(fresh_state(learner), mini)
    with jax.enable_x64(True):
        logprobs = learned_logprobs(params64())
        value, slopes = jax.jit(jax.value_and_grad(lambda logprobs: objective(case, logprobs)))(logprobs)
        want = slope_of(params64(), slopes)
    np.testing.assert_allclose(float(metrics["loss/total"]), float(value), rtol=1e-4, atol=1e-6)
    assert_gradients_agree(first_gradient(state), jax.tree.map(np.asarray, want), relative=3e-5)


def test_generalised_advantages_run_through_the_branches_in_their_order():
    batch = batch_of()
    rng, gamma, lam = np.random.default_rng(5), 0.9, 0.8
    values = rng.normal(size=batch.fields["mask"].shape).astype(np.float32)
    algorithm = PPO(correction=None, gamma=gamma, lam=lam)
    assigned = jax.device_get(jax.jit(algorithm.advantages)(batch.sequences({"values": values}, {}, 2)))
    flat, want_returns = [], []
    for i, reward in enumerate([x for group in REWARDS for x in group]):
        if i == INVALID:
            continue
        v = values[i][batch.fields["mask"][i]].astype(np.float64)
        advantage, following, found = 0.0, 0.0, []
        for t in reversed(range(len(v))):
            delta = (reward if t == len(v) - 1 else 0.0) + gamma * following - v[t]
            advantage, following = delta + gamma * lam * advantage, v[t]
            found.insert(0, advantage)
        flat += found
        want_returns += list(np.array(found) + v)
    np.testing.assert_allclose(assigned.returns[assigned.loss_mask], want_returns, rtol=1e-4, atol=1e-5)
    scaled = (np.array(flat) - np.mean(flat)) / np.std(flat, ddof=1)
    np.testing.assert_allclose(assigned.advantages[assigned.loss_mask], scaled, rtol=1e-4, atol=1e-5)


def test_every_branch_is_packed_as_the_sampler_saw_it_and_every_sampled_token_once():
    batch = batch_of(replace(PACKING, rows=4))
    (rows,) = batch.minibatches[0]
    seen: list[tuple[int, ...]] = []
    for r in range(rows.tokens.shape[0]):
        for segment in range(1, rows.segments[r].max() + 1):
            here = rows.segments[r] == segment
            np.testing.assert_array_equal(rows.positions[r][here], np.arange(here.sum()))
            seen.append((*rows.tokens[r][here].tolist(), int(rows.targets[r][here][-1])))
    want = []
    for branches in trajectories():
        for branch in branches:
            end = np.flatnonzero(branch.mask)[-1] + 1 if branch.mask.any() else 0
            whole = np.concatenate([branch.prefix, branch.tokens[: end if len(branches) > 1 else None]])
            want += [tuple(whole.tolist())] if end else []
    assert sorted(seen) == sorted(want) and len(want) == 8
    learned = rows.scatter(batch.fields["mask"])
    targets = sorted(rows.targets[learned.astype(bool)].tolist())
    assert targets == sorted(t for branches in trajectories() for b in branches for t in b.tokens[b.mask].tolist())
    assert sorted(rows.members[rows.members >= 0].tolist()) == [0, 1, 2, 3, 4]


def test_the_view_grows_until_the_longest_trajectory_has_room():
    batch = batch_of()
    # The branches of the first rollout have 7, 3 and 4 tokens from their first to their last learned one: 14 of 16.
    assert batch.response_tokens == 16 and batch.fields["mask"].shape == (6, 16)
    assert batch.fields["mask"].sum(1).tolist() == [5 + 3 + 4, 4, 3, 2 + 5, 6, 0]
    single = make_group(groups()[0].rollouts[1:2], {"r": [1.0]})
    assert batch_of(kept=(single,)).response_tokens == RESPONSE


def test_the_view_grows_for_one_branch_with_more_than_an_answers_most_tokens():
    # Two answers within the limit, and what an agent's tool said in between.
    long = forked(make_prompt("a", [1, 2, 3], source="s"), [make_branch(8, 3, "11000001111")])
    batch = batch_of(kept=(make_group([long], {"r": [1.0]}),))
    assert RESPONSE < 11 and batch.response_tokens == 16
    assert batch.fields["mask"][0].tolist() == [c == "1" for c in "1100000111100000"]
    (rows,) = batch.rows
    unpacked = batch.unpack([rows.scatter(batch.tokenwise([np.arange(1.0, 12.0)]))])
    assert unpacked[0].tolist() == [*range(1, 12), 0, 0, 0, 0, 0]


def test_a_rollout_of_one_named_branch_is_packed_as_one_without():
    prompt = make_prompt("p", [1, 2, 3], source="s")
    plain = make_rollout(prompt, [4, 5, 6, 7], mask=[1, 0, 1, 0])
    named = replace(plain, branches=plain.paths)
    for one, other in zip(*(batch_of(kept=(make_group([r], {"r": [1.0]}),)).rows for r in (plain, named)), strict=True):
        for name in ("tokens", "targets", "positions", "segments", "sequence", "row_of", "index_of", "members"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert row(named) is named


def test_spans_follow_the_tokens_of_their_branches():
    rollout = groups()[0].rollouts[0]
    lengths = [len(b.tokens) for b in rollout.branches]
    numbers = np.arange(sum(lengths))
    marked = replace(rollout, spans={"odd": numbers % 2 == 1})
    # Tokens 0..6 of the first branch, 5..7 of the second, which begins at 7, and 0..3 of the third, which begins at 15.
    assert row(marked).spans["odd"].tolist() == [n % 2 == 1 for n in (*range(7), 12, 13, 14, 15, 16, 17, 18)]


def test_token_stats_of_a_rollout_are_means_over_all_of_its_branches():
    batch = batch_of()
    stats = np.where(batch.fields["mask"], np.arange(16, dtype=np.float32), 1e6)
    (first, second) = means_of_rollouts(groups(), {"entropy": stats})
    # The first row learns from places 0-2 and 5-6 of its first branch, and from all of the 3 and 4 that follow at 7 and 10.
    assert first["entropy"][0] == pytest.approx(np.mean([0, 1, 2, 5, 6, *range(7, 14)]))
    assert second["entropy"][0] == pytest.approx(np.mean([0, 1, 2, 3, 5, 6, 7]))


@pytest.mark.parametrize(("most", "branches", "tokens"), [(None, 0, 0), (3, 0, 0), (2, 2, 5 + 2), (1, 4, 5 + 3 + 2)])
def test_the_last_branches_are_kept_and_the_tokens_of_the_others_are_counted(most, branches, tokens):
    found = bounded(groups(), PACKING, most)
    assert (found.branches, found.tokens) == (branches, tokens)
    three = found.groups[0].rollouts[0]
    assert three.branches == groups()[0].rollouts[0].branches[-(most or 3) :]
    assert found.groups[0].rollouts[1] is groups()[0].rollouts[1]


def test_branches_that_do_not_fit_a_micro_batch_together_are_left_out_and_counted():
    # Of 10, 11 and 9 tokens, which take 9, 10 and 8 positions: two rows of 10 hold two of them.
    narrow = Packing(row_tokens=10, rows=2, sequences_per_row=3)
    found = bounded(groups(), narrow, None)
    assert len(found.groups[0].rollouts[0].branches) == 2 and found.tokens >= 5
    assert narrow.fits([stretch.positions for stretch in stretches(found.groups[0].rollouts[0])])
    assert not narrow.fits([stretch.positions for stretch in stretches(groups()[0].rollouts[0])])
