"""Numbers of a step on the host, from two groups written out: invalid and greedy rollouts leave them."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_group, make_prompt, make_rollout

from jaxrl_llm.experience import Group, Prompt, unscored
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.metrics.diagnostics import check_gap, gap, of_rollouts, staleness

NAN = float("nan")


def two_groups() -> list[Group]:
    """Totals 1, 3, invalid, and 2 for the greedy one; then 2 and 2, with 9 for the greedy one."""
    a = make_prompt("a", [1, 2], reference="4")
    b = Prompt(id="b", messages=[{"role": "user", "content": "1+1?"}], tokens=np.array([3], np.int32))
    roles = ["sample", "sample", "sample", "greedy"]
    first = [make_rollout(a, range(n), role=role, text=f"t{n}") for n, role in zip((1, 2, 6, 3), roles)]
    second = [make_rollout(b, [5, 6], finish="length"), make_rollout(b, [5], mask=[0])]
    second.append(make_rollout(b, [5, 5], role="greedy"))
    return [
        make_group(
            first,
            {"main": [1, 2, NAN, 2], "style": [0, 1, 7, 0], "log/judge": [5, NAN, 1, 1]},
            {"main": [True, True, False, True], "log/judge": [True, False, True, True]},
        ),
        make_group(second, {"main": [2, 2, 9]}),
    ]


def build(groups: list[Group]) -> Batch:
    packing = Packing(row_tokens=8, rows=2, sequences_per_row=4)
    return Batch.build(groups, packing, minibatches=1, sources=[""], response_tokens=6, capacity=8)


def test_rewards_lengths_and_packing_of_a_step():
    found = of_rollouts(build(two_groups()))
    totals = [1, 3, 2, 2]
    expected = {
        "batch/sequences": 7,
        "batch/microbatches": 2,  # 21 positions, of 16 a micro-batch
        "batch/fill": 21 / 32,
        "batch/tokens": 21,
        "batch/response_tokens": 16,  # all but the environment's
        "reward/mean": np.mean(totals),
        "reward/std": np.std(totals),
        "reward/group_std": 0.5,  # 1 and 3 in one group, 2 and 2 in the other
        "reward/main": 7 / 4,
        "reward/style": 1 / 2,  # of the group that has it
        "reward/log/judge": 5,
        "response/length": 6 / 4,
        "response/length_max": 2,
        "response/truncated": 1 / 4,
        "groups/no_signal": 1 / 2,  # the greedy answer's 9 teaches nothing
    }
    assert found == pytest.approx(expected)


def test_a_group_of_invalid_rollouts_has_no_signal():
    rollouts = [make_rollout(make_prompt(), [1]), make_rollout(make_prompt(), [2])]
    groups = [make_group(rollouts, {"r": [1, 2]}, {"r": [False, False]}), make_group(rollouts, {"r": [1, 2]})]
    found = of_rollouts(build(groups))
    assert (found["groups/no_signal"], found["reward/mean"]) == (0.5, 1.5)


def test_given_responses_have_no_rewards():
    pair = unscored([make_rollout(make_prompt(), [1]), make_rollout(make_prompt(), [2, 3])], (1, -1))
    for group in (pair, unscored([make_rollout(make_prompt(), [1])])):
        assert {name.split("/")[0] for name in of_rollouts(build([group]))} == {"batch"}


def test_the_gap_of_learner_and_sampler_over_the_tokens_the_policy_drew():
    batch = build(two_groups())
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.3, (8, 6))
    entropy = rng.uniform(0, 2, (8, 6))
    old = (batch.fields["sampler_logprobs"] + d).astype(np.float32)
    found = gap(batch, {"old_logprobs": old, "entropy": entropy.astype(np.float32)})
    drawn = np.zeros((8, 6), bool)
    for row, n in enumerate((1, 2, 6, 0, 2)):  # the fourth is greedy, the sixth is an environment's
        drawn[row, :n] = True
    d, entropy, old = d[drawn], entropy[drawn], old[drawn]
    expected = {
        "gap/mean": np.abs(d).mean(),
        "gap/p99": np.quantile(np.abs(d), 0.99),
        "gap/max": np.abs(d).max(),
        "gap/k3": np.mean(np.exp(d) - 1 - d),
        "gap/compared": 11,
        "gap/differing": 11,
        **{f"gap/above_1e-{n}": (np.abs(d) > 10.0**-n).sum() for n in range(1, 7)},
        "entropy/mean": entropy.mean(),
        "logprob/mean": old.mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_k3_estimates_the_divergence_of_the_sampler_from_the_learner():
    sampler, learner = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    tokens = np.repeat(np.arange(3), [50, 30, 20])  # in the sampler's proportions
    rollout = make_rollout(make_prompt(), tokens, logprobs=np.log(sampler)[tokens])
    groups = [make_group([rollout], {"r": [0]})]
    packing = Packing(row_tokens=128, rows=1, sequences_per_row=1)
    batch = Batch.build(groups, packing, minibatches=1, sources=[""], response_tokens=100, capacity=1)
    old = np.log(learner)[tokens][None].astype(np.float32)
    found = gap(batch, {"old_logprobs": old, "entropy": np.zeros_like(old)})
    assert found["gap/k3"] == pytest.approx(np.sum(sampler * np.log(sampler / learner)), rel=1e-5)


def test_tokens_of_which_the_last_bit_differs_are_counted():
    batch = build(two_groups())
    sampler = batch.fields["sampler_logprobs"]
    old = sampler.copy()
    old[1, 1], old[2, 0] = np.nextafter(sampler[1, 1], np.float32(1)), sampler[2, 0] - np.float32(0.02)
    old[0, 1] += 1  # which was not drawn
    found = gap(batch, {"old_logprobs": old, "entropy": np.zeros_like(old)})
    counts = [
        found[name] for name in ("gap/compared", "gap/differing", "gap/above_1e-6", "gap/above_1e-2", "gap/above_1e-1")
    ]
    assert counts == [11, 2, 1, 1, 0]


def test_a_step_without_drawn_tokens_has_no_gap():
    batch = build([make_group([make_rollout(make_prompt(), [1], role="greedy")], {"r": [1]})])
    assert gap(batch, {"old_logprobs": np.zeros((8, 6)), "entropy": np.zeros((8, 6))}) == {}


def test_staleness_is_known_without_the_learners_log_probs():
    prompt = make_prompt("a", [1])
    rollouts = [make_rollout(prompt, [5, 6]), make_rollout(prompt, [7])]
    aged = [replace(r, versions=np.array(v, np.int32)) for r, v in zip(rollouts, ([3, 4], [2]), strict=True)]
    batch = build([unscored(aged)])
    known = {"staleness/mean": 2.0, "staleness/max": 3.0}  # behind version 5 by 2, 1 and 3
    assert staleness(batch, {}, 5) == pytest.approx(known)
    gaps = staleness(batch, {"old_logprobs": batch.fields["sampler_logprobs"] + 0.5}, 5)
    assert gaps == pytest.approx(known | {f"gap/lag{n}": 0.5 for n in (1, 2, 3)})


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"gap/mean": 0.2, "gap/lag0": 0.001, "gap/lag1": 0.4}, None),
        (
            {"gap/mean": 0.2, "gap/lag0": 0.1, "gap/lag1": 0.3},
            "disagree by 0.1 nats a token on average (Stage.gap_warn=0.05); where",
        ),
        ({"gap/mean": 0.2, "gap/lag1": 0.2}, "by 0.2 nats a token on average, on tokens of 1 versions before, part"),
        ({"gap/mean": 0.2}, "disagree by 0.2 nats a token on average (Stage"),
    ],
)
def test_what_was_learned_since_is_no_disagreement_of_sampler_and_learner(caplog, metrics, said):
    check_gap(metrics, warn=0.05, stop=1.0)
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])
