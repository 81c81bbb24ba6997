"""A step's only update has old log-probs of its own pass; a measured rule says when the sampler's stand for them in steps of several."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import (
    GROUPS,
    GRPO_CASE,
    PACKING,
    advantages_and_counted,
    assert_gradients_agree,
    expected_streams,
    first_gradient,
    fresh_state,
    grpo_objective,
    host_params,
    make_batch,
    make_learner,
    make_stats,
    padded,
)

from jaxrl_llm import command_line
from jaxrl_llm.algorithms.correction import Correction, Rejection
from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rollouts.pairs import BestAgainstWorst
from jaxrl_llm.train.old_logprobs import CALM, TAKEN, GapRule
from jaxrl_llm.train.stage import Stage


def test_the_gradient_is_that_of_old_log_probs_scored_before() -> None:
    """The reference knows the policy's log-probs in float64; the learner is given the sampler's in their place, and scores nothing."""
    learner = make_learner(replace(GRPO_CASE, correction=None), own_old=True, correction=Correction())
    batch, given = make_batch(), make_stats()
    stats = {n: batch.tokenwise(list(given[n])) for n in ("sampler_logprobs", "ref_logprobs")}
    sequences = batch.sequences(
        {"old_logprobs": stats["sampler_logprobs"], "ref_logprobs": stats["ref_logprobs"]},
        learner.algorithm.controls, GROUPS,
    )  # fmt: skip
    assigned = jax.device_get(learner.advantages(sequences))
    (mini,) = batch.micro_batches(sequences, assigned, learner.algorithm.constant, learner.partitioner)
    state, metrics = learner.update(fresh_state(learner), mini)

    own = {**given, "old_logprobs": expected_streams()[0]}
    objective = partial(grpo_objective, stats={n: x.astype(np.float64) for n, x in own.items()})
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), host_params())
        gradient = jax.tree.map(np.asarray, jax.jit(jax.grad(objective))(params))
    assert_gradients_agree(first_gradient(state), gradient)

    read = padded()["mask"] & advantages_and_counted()[1][:, None]
    gap = (own["old_logprobs"] - given["sampler_logprobs"].astype(np.float64))[read]
    wanted = {
        "ratio/mean": 1.0, "ratio/clip_fraction": 0.0, "kl/k3_to_old": 0.0, "gap/mean": np.abs(gap).mean(),
        "gap/k3": (np.exp(gap) - 1 - gap).mean(), "logprob/mean": own["old_logprobs"][read].mean(),
        "entropy/mean": expected_streams()[1][read].mean(), "correction/weight_mean": np.minimum(np.exp(gap), 2.0).mean(),
        "correction/changed_fraction": (np.exp(gap) > 2.0).mean(), "gap/compared": len(gap), "gap/differing": len(gap),
        "gap/above_1e-1": (np.abs(gap) > 0.1).sum(), "gap/above_1e-6": len(gap),
    }  # fmt: skip
    assert 0.05 < wanted["correction/changed_fraction"] < 0.5 and wanted["gap/mean"] > 0.3
    for name, value in wanted.items():
        np.testing.assert_allclose(float(metrics[name]), value, rtol=1e-4, atol=1e-6, err_msg=name)


def stage(algorithm: Any = GRPO(), **fields: Any) -> Stage:  # noqa: B008
    known = {"reward": Exact(), "group_size": 2, "max_prompt_tokens": 8, "packing": replace(PACKING, row_tokens=600)}
    return Stage(name="rl", algorithm=algorithm, data=Sorting(), optimizer=Optimizer(), steps=1, **known | fields)


@pytest.mark.parametrize(
    ("algorithm", "fields", "why"),
    [
        (GRPO(), {"minibatches": 2, "prompts_per_step": 4}, "a step makes 2 updates"),
        (GRPO(), {"epochs": 3}, "a step makes 3 updates"),
        (GRPO(rejections=(Rejection(),)), {}, "rejections, or a correction"),
        (GRPO(correction=Correction(level="sequence")), {}, "rejections, or a correction"),
        (GRPO(correction=Correction(normalize=True)), {}, "rejections, or a correction"),
        (GRPO(correction=Correction(veto=0.1)), {}, "rejections, or a correction"),
        (DPO(answers_of="policy"), {"pairing": BestAgainstWorst()}, "DPO is no policy gradient"),
    ],
)
def test_what_needs_old_log_probs_before_the_update_is_refused_them(algorithm, fields, why) -> None:
    with pytest.raises(ValueError, match=rf"Stage.old_logprobs of stage 'rl' is 'update' and {why}"):
        stage(algorithm, old_logprobs="update", **fields)


def test_auto_is_the_updates_own_where_a_step_makes_one_and_else_a_measured_rule() -> None:
    one, several = stage(old_logprobs="auto"), stage(old_logprobs="auto", epochs=2)
    assert (one.old_from, several.old_from, stage().old_from) == ("update", "measured", "learner")
    assert stage(GRPO(correction=Correction(mode="mask")), old_logprobs="auto").old_from == "update"
    assert one.controls == {} and several.controls == {TAKEN: 0.0, CALM: 0.0}
    assert not any(one.scores(step, {}) for step in range(20))
    with pytest.raises(ValueError, match=r"with Stage.old_logprobs = 'auto' of stage 'rl' that ratio is 1 everywhere"):
        stage(GRPO(correction=Correction(mode="mask")), old_logprobs="auto", epochs=2)


def test_the_rule_takes_the_samplers_after_small_gaps_in_a_row_and_gives_them_up_at_a_large_one(capsys) -> None:
    rule = GapRule(below=0.1, above=0.2, steps=3, every=4)
    config = stage(old_logprobs="auto", epochs=2, gap_rule=rule)
    gaps = {
        1: 0.05,
        2: 0.1,
        3: 0.11,
        4: 0.0,
        5: 0.1,
        6: 0.02,
        8: 0.2,
        12: 0.21,
        13: 0.1,
        14: 0.1,
        15: 0.05,
        16: float("nan"),
    }
    state, scored, taken = config.controls, [], []
    for step in range(1, 18):
        if config.scores(step, state):
            scored.append(step)
        state = {
            **state,
            **rule.moved(
                state, {"gap/p99": gaps[step]} if config.scores(step, state) and step in gaps else {}, tells=True
            ),
        }
        taken.append(int(state[TAKEN]))
    assert scored == [1, 2, 3, 4, 5, 6, 8, 12, 13, 14, 15, 16, 17]
    assert taken == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == [f"gap/p99 is {gap}" for gap in ("0.02", "0.21", "0.05", "nan")]
    assert [("sampler's from here on" in line, "scores old log-probs again" in line) for line in said] == [
        (True, False),
        (False, True),
    ] * 2


def test_a_binding_of_the_rule_reaches_the_stage() -> None:
    run, _ = command_line.build(
        ["gin/quickstart.gin"], ["train.GapRule.steps = 2", "rl/train.Stage.old_logprobs = 'auto'"]
    )
    assert run.stages[-1].gap_rule == GapRule(steps=2) and run.stages[-1].old_from == "measured"


def test_a_rule_without_room_between_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.GapRule.above must be >= 0.3 \(got 0.2\)"):
        GapRule(below=0.3)
