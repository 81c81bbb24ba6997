"""Means, truncation and diversity of greedy and sampled answers, by hand from a sampler whose answers are known."""

import asyncio
import math
import re
from typing import Any

import numpy as np
import pytest
from builders import EchoSampler, Words, make_group, make_prompt, make_rollout

from jaxrl_llm.eval.answered import Answered, estimate, records
from jaxrl_llm.eval.evaluate import SEED, Evaluation, evaluate, summary
from jaxrl_llm.eval.maths import AtK
from jaxrl_llm.experience import Prompt, SamplingParams, seed_of
from jaxrl_llm.rewards.wrap import Wrap
from jaxrl_llm.rollouts.collect import RolloutGenerator


class Held:
    def rows(self) -> list[Prompt]:
        return [make_prompt(str(i), [i]) for i in range(3)]


def second_token(prompt: Prompt, text: str) -> float:
    """The number of the draw, from 1; the third cannot be judged."""
    draw = float(text.split()[1])
    return math.nan if draw == 3 else draw + 10 * prompt.tokens[0]


def run(reward: Any = Wrap(function=second_token), **fields: Any):  # noqa: B008
    evaluation = Evaluation(data=Held(), **{"settings": SamplingParams(max_tokens=8, top_k=5), **fields})
    generator = RolloutGenerator(sampler=EchoSampler(order=1), tokenizer=Words())
    metrics, groups = asyncio.run(evaluate(evaluation, Held().rows(), generator, reward))
    return metrics, groups, generator


def test_greedy_and_sampled_means_over_valid_answers():
    metrics, groups, generator = run(samples=4)
    assert metrics == pytest.approx({
        "eval/heldout/greedy": np.mean([1, 11, 21]),
        "eval/heldout/greedy_truncated": 0,
        "eval/heldout/greedy_length": 3,
        "eval/heldout/greedy_distinct": 3,
        "eval/heldout/sampled": np.mean([1, 2, 4, 11, 12, 14, 21, 22, 24]),
        "eval/heldout/sampled_truncated": 0,
        "eval/heldout/sampled_length": 3,
        "eval/heldout/sampled_distinct": 12,
        "eval/heldout/sampled_invalid": 3,
        "eval/heldout/prompts": 3,
    })  # fmt: skip
    assert [len(g.rollouts) for g in groups] == [1, 1, 1, 4, 4, 4]
    assert [g.rollouts[0].prompt.id for g in groups] == ["0", "1", "2"] * 2
    assert not generator.counters  # the training's own counters do not hold what an evaluation asked


def test_a_run_measures_what_an_evaluation_alone_does():
    def first(prompt: Prompt, text: str) -> float:
        return float(text.split()[1] == "1")

    metrics, _, _ = run(reward=Wrap(function=first), samples=4, answer=str.upper, measures=[AtK(ks=(1, 2))])
    found = {name.removeprefix("eval/heldout/"): value for name, value in metrics.items() if "@" in name}
    # One of four is right: 3 of 6 pairs hold it, and it ties with the other answer of its pair.
    assert found == pytest.approx({"avg@4": 1 / 4, "pass@1": 1 / 4, "pass@2": 1 / 2, "maj@2": 1 / 4})
    with pytest.raises(ValueError, match=r"two measures that give .'avg@4', 'pass@1'.: leave one out"):
        run(reward=Wrap(function=first), samples=4, measures=[AtK(ks=(1,)), AtK(ks=(1,))])


def test_sampled_answers_use_the_settings_and_greedy_ones_their_limits_alone():
    _, _, generator = run(samples=2)
    (_, one, greedy, _), (_, two, sampled, seeds) = generator.sampler.calls
    assert (one, greedy) == (1, SamplingParams(max_tokens=8, temperature=0.0))
    assert (two, sampled) == (2, SamplingParams(max_tokens=8, top_k=5))
    assert seeds == [seed_of(SEED, i) for i in range(3)]


@pytest.mark.parametrize(("fields", "kinds"), [({"samples": 0}, {"greedy"}), ({"greedy": False}, {"sampled"})])
def test_only_what_is_asked_for_is_measured(fields, kinds):
    metrics, groups, _ = run(name="test", **fields)
    assert {name.split("/")[2].split("_")[0] for name in metrics} == kinds | {"prompts"} and len(groups) == 3


def test_answers_that_reach_the_limit_are_counted():
    metrics, _, _ = run(samples=0, settings=SamplingParams(max_tokens=2))
    assert (metrics["eval/heldout/greedy_truncated"], metrics["eval/heldout/greedy_length"]) == (1.0, 2.0)


def test_the_summary_of_mixed_answers():
    prompt = make_prompt()
    answers = [make_rollout(prompt, range(n), text=t, finish=f) for n, t, f in ((1, "x", "stop"), (4, "x", "length"))]

    def found(*valid: bool) -> dict[str, float]:
        scores = make_group(answers, {"r": [1, 0]}, {"r": valid}).scores
        one = Answered(prompt=prompt, records=records(answers, scores, "sampled"))
        assert not one.of("greedy")
        return {name: estimate(values).mean for name, values in summary([one], "sampled").items()}

    assert found(True, True) == {"": 0.5, "_truncated": 0.5, "_length": 2.5, "_distinct": 1}
    nothing = found(False, False)
    assert math.isnan(nothing[""]) and nothing["_invalid"] == 2
    assert found(True, False)[""] == 1.0


def test_a_reward_that_waits_for_the_learner_is_refused():
    class Waits(Wrap):
        needs_stats = True

    with pytest.raises(
        ValueError, match=r"'heldout' has no learner to give Waits its statistics: set Evaluation.reward"
    ):
        run(reward=Waits(function=second_token))


def test_an_evaluation_that_measures_nothing_is_refused():
    with pytest.raises(ValueError, match=r"set Evaluation.greedy or Evaluation.samples >= 1"):
        Evaluation(data=Held(), greedy=False, samples=0)
    with pytest.raises(ValueError, match=re.escape("evaluate.Evaluation.limit must be >= 1 (got 0)")):
        Evaluation(data=Held(), limit=0)
