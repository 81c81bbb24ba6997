"""Preferences among samples: which ones are preferred and rejected, what is left out, and what is told of all samples."""

import asyncio
from typing import Any

import numpy as np
import pytest
from builders import make_group, make_prompt, make_rollout

from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.experience import Group
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.metrics import diagnostics
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rollouts.pairs import AboveTheMean, BestAgainstWorst, DemonstrationAgainstSample, PairedGroups
from jaxrl_llm.train.stage import Stage

ENCODER = Encoder(tokenizer=CharTokenizer(alphabet="abcdefghijs:=").load(), max_prompt_tokens=16, max_response_tokens=8)


class Given:
    """A loader of one step's groups."""

    def __init__(self, *groups: Group):
        self.groups = groups

    async def next(self, step: int) -> list[Group]:
        return list(self.groups)

    def state(self) -> dict[str, Any]:
        return {"at": 3}

    def restore(self, state: Any) -> None:
        self.state_given = state

    def take(self) -> dict[str, float]:
        return {"count/empty": 1.0, "reward/mean": 9.0}


def group(rewards: list[float], valid: list[bool] | None = None, **prompt: Any) -> Group:
    asked = make_prompt("p", (1, 2, 3), **prompt)
    rollouts = [make_rollout(asked, (4, 5 + i)) for i in range(len(rewards))]
    return make_group(rollouts, {"main": rewards}, None if valid is None else {"main": valid})


def paired(pairing: Any, *groups: Group) -> tuple[list[Group], PairedGroups]:
    loader = PairedGroups(loader=Given(*groups), pairing=pairing, encoder=ENCODER)
    return asyncio.run(loader.next(1)), loader


def answers(found: Group) -> list[tuple[int, float]]:
    """(the last token, the side) of each answer."""
    return [(int(r.tokens[-1]), float(s)) for r, s in zip(found.rollouts, found.scores.parts["log/side"], strict=True)]


def test_the_best_is_preferred_to_the_worst_among_samples_with_a_reward() -> None:
    (first, second), _ = paired(BestAgainstWorst(), group([1, 5, 0, 5]), group([1, 9, 2, 0], [True, False, True, True]))
    assert answers(first) == [(6, 1), (7, -1)] and first.scores.parts["main"].tolist() == [5, 0]
    assert answers(second) == [(7, 1), (8, -1)]


def test_samples_above_the_mean_of_their_prompt_are_preferred_and_those_on_it_left_out() -> None:
    (found,), _ = paired(AboveTheMean(), group([0, 4, 2, 2, 2]))
    assert answers(found) == [(5, -1), (6, 1)]
    (found,), _ = paired(AboveTheMean(), group([0, 0, 3]))
    assert answers(found) == [(5, -1), (6, -1), (7, 1)]


def test_a_prompt_without_a_preference_stays_and_teaches_nothing() -> None:
    found, loader = paired(BestAgainstWorst(), group([2, 2, 2]), group([1, 0]), group([1, 0], [True, False]))
    assert answers(found[0]) == [(5, 0), (6, 0)] and answers(found[2]) == [(5, 0), (6, 0)]
    batch = Batch.build(
        found, Packing(row_tokens=16, rows=4), minibatches=1, sources=[""], response_tokens=4, capacity=6
    )
    zeros = np.zeros((6, 4), np.float32)
    assigned = DPO(answers_of="policy").advantages(batch.sequences({"ref_logprobs": zeros}, {}, 3))
    assert np.asarray(assigned.loss_mask).any(1).tolist() == [False, False, True, True, False, False]
    told = loader.take()
    assert told["pairs/none"] == pytest.approx(2 / 3) and told["count/empty"] == 1
    assert told["reward/mean"] == pytest.approx(8 / 6)  # of all samples with a reward, not of the pairs
    assert told["reward/std"] == pytest.approx(np.std([2, 2, 2, 1, 0, 1]))


def test_a_demonstration_is_preferred_to_a_sample_and_is_none_of_the_samplers_draws() -> None:
    (found,), loader = paired(DemonstrationAgainstSample(), group([0.0, 1.0], response="abc"))
    shown = found.rollouts[0]
    encoded = ENCODER.demonstration(make_prompt("p", (1, 2, 3), response="abc"))
    assert encoded is not None and shown.tokens.tolist() == encoded.tokens.tolist() and shown.role == "given"
    assert answers(found)[1] == (5, -1) and found.scores.parts["log/side"].tolist() == [1, -1]
    batch = Batch.build(
        [found], Packing(row_tokens=16, rows=4), minibatches=1, sources=[""], response_tokens=8, capacity=2
    )
    drawn = np.full((2, 8), -0.5, np.float32)
    measured = diagnostics.gap(batch, {"old_logprobs": drawn, "entropy": drawn})
    assert measured["gap/max"] == 0  # the demonstration's sampler log-probs, which are 0, are not compared
    assert loader.take()["reward/mean"] == 0.5
    long, _ = paired(DemonstrationAgainstSample(), group([0.0], response="abcabcabc"))
    assert answers(long[0]) == [(5, 0)]
    with pytest.raises(ValueError, match="prompt 'p' has no response to prefer"):
        paired(DemonstrationAgainstSample(), group([0.0]))


def test_its_place_in_the_data_is_the_loaders() -> None:
    loader = PairedGroups(loader=Given(), pairing=BestAgainstWorst(), encoder=ENCODER)
    assert loader.state() == {"at": 3}
    loader.restore({"at": 5})
    assert loader.loader.state_given == {"at": 5}


def test_a_stage_whose_loss_and_pairing_do_not_fit_is_refused() -> None:
    def stage(algorithm: Any, **fields: Any) -> Stage:
        known = {"reward": Exact(), "group_size": 2, "max_prompt_tokens": 8, "packing": Packing(row_tokens=600)}
        return Stage(name="rl", algorithm=algorithm, data=Sorting(), optimizer=Optimizer(), steps=1, **known | fields)

    online = DPO(answers_of="policy")
    assert stage(online, pairing=BestAgainstWorst(), group_size=4).sequences == 32 * 4
    assert stage(online, pairing=DemonstrationAgainstSample(), group_size=1).sequences == 32 * 2
    with pytest.raises(ValueError, match=r"Stage.pairing of stage 'rl' is not set.*PAIRING"):
        stage(online)
    with pytest.raises(ValueError, match="set PAIRING = None"):
        stage(GRPO(), pairing=BestAgainstWorst())
    with pytest.raises(ValueError, match="group_size >= 2"):
        stage(online, pairing=BestAgainstWorst(), group_size=1)
    with pytest.raises(ValueError, match="old_logprobs = 'learner'"):
        stage(online, pairing=DemonstrationAgainstSample(), old_logprobs="sampler")
