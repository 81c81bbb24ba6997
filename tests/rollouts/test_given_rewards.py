"""Rewards of environments stand beside those of components; what is not known is invalid, and never 0."""

import asyncio
from dataclasses import replace

import numpy as np
from builders import make_prompt, make_rollout

from jaxrl_llm.experience import Group, Scores
from jaxrl_llm.rollouts.given_rewards import scored


class Lengths:
    """The number of tokens, and the mean of a token stat where it is given."""

    needs_stats = False

    async def score(self, rollouts, stats=None) -> Scores:
        values = np.array([len(r.tokens) for r in rollouts], float)
        parts = {"length": values} if stats is None else {"length": values, "entropy": stats["entropy"]}
        return Scores(
            parts=parts, valid={name: np.ones(len(rollouts), bool) for name in parts}, weights={"length": 0.1}
        )


def rollouts():
    made = [make_rollout(make_prompt(), [1] * n) for n in (1, 2, 3)]
    return [
        replace(made[0], rewards={"won": 1.0, "style": None}),
        replace(made[1], valid=False),
        replace(made[2], rewards={"won": 0.0}),
    ]


def ask(*args, **kwargs) -> Scores:
    return asyncio.run(scored(*args, **kwargs))


def test_parts_of_an_environment_stand_beside_those_of_a_reward():
    found = ask(Lengths(), rollouts(), {"won": 2.0, "other": 5.0})
    assert {name: x.tolist() for name, x in found.parts.items()} == {
        "length": [1, 0, 3],
        "env/won": [1, 0, 0],
        "env/style": [0, 0, 0],
    }
    assert {name: x.tolist() for name, x in found.valid.items()} == {
        "length": [True, False, True], "env/won": [True, False, True], "env/style": [False, False, False],
    }  # fmt: skip
    assert found.weights == {"length": 0.1, "env/won": 2.0}
    known = ask(Lengths(), rollouts(), {"style": 0.0, "won": 2.0})
    group = Group(rollouts=rollouts(), scores=known)
    assert group.valid().tolist() == [True, False, True] and np.allclose(group.total(), [2.1, 0, 0.3])


def test_a_reward_gets_the_token_stats_of_the_valid_rollouts():
    found = ask(Lengths(), rollouts(), {"style": 0.0}, {"entropy": np.array([0.1, 0.2, 0.3])})
    assert found.parts["entropy"].tolist() == [0.1, 0.0, 0.3] and found.valid["entropy"].tolist() == [True, False, True]


def test_rollouts_that_nobody_scored_are_invalid():
    silent = [make_rollout(make_prompt(), [1]), make_rollout(make_prompt(), [2])]
    assert not Group(rollouts=silent, scores=ask(None, silent, {})).valid().any()
    given = [replace(silent[0], rewards={"won": float("nan")}), replace(silent[1], rewards={"won": -1.0})]
    group = Group(rollouts=given, scores=ask(None, given, {}))
    assert group.valid().tolist() == [False, True] and group.total().tolist() == [0.0, -1.0]


def test_without_an_environment_the_scores_are_the_rewards_own():
    plain = [make_rollout(make_prompt(), [1])]
    found = ask(Lengths(), plain, {})
    assert found.parts.keys() == {"length"} and found.weights == {"length": 0.1}


def test_a_rollout_that_failed_is_invalid_whatever_the_reward_says():
    failed = [replace(make_rollout(make_prompt(), [1]), valid=False)]
    found = Group(rollouts=failed, scores=Scores(parts={"r": np.ones(1)}, valid={"r": np.ones(1, bool)}))
    assert found.valid().tolist() == [False]
