"""Classes, distinctness and DARLING's reward: worked examples of the method, derived by hand from its formulas."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from jaxrl_llm.experience import Group, Prompt, Rollout, Scores
from jaxrl_llm.rewards.darling import Darling
from jaxrl_llm.rewards.distinctness import ByClasses, ByLogprob, ByNgrams, of_sizes
from jaxrl_llm.rewards.format import Format
from jaxrl_llm.rewards.pairs import SameText, SharedWords
from jaxrl_llm.rewards.partition import Partition, class_sizes, linked, short_texts_equal
from jaxrl_llm.rewards.wrap import Failed, Wrap

Score = Callable[..., Scores]
MakeGroup = Callable[..., Group]

LETTERS = Partition(pairs=SameText(pattern=r"(\w)"), short_words=0)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A classifier that is down."""

    async def similar(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        raise Failed("nobody answers")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Says which pairs are alike, and notes what it was asked."""

    alike: Sequence[tuple[str, str]]
    asked: list

    async def similar(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        self.asked.extend(pairs)
        return [0.6 if pair in self.alike else 0.5 for pair in pairs]


def graph(n: int, *edges: tuple[int, int]) -> np.ndarray:
    equal = np.eye(n, dtype=bool)
    for i, j in edges:
        equal[i, j] = equal[j, i] = True
    return equal


def test_distinctness_falls_with_the_class_to_its_floor() -> None:
    expected = [1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0.1]
    values = [of_sizes(np.array([size] + [1] * 7))[0] for size in range(1, 9)]
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose(of_sizes(np.array([4, 4, 4, 4, 2, 2, 1, 1]))[[0, 4, 6]], [4 / 7, 6 / 7, 1])
    assert of_sizes(np.array([1])).tolist() == [1.0] and of_sizes(np.zeros(0, np.int64)).tolist() == []


def test_a_chain_is_one_class_by_single_linkage_alone() -> None:
    chain = graph(3, (0, 1), (1, 2))
    assert linked(chain, "single").tolist() == [0, 0, 0]
    assert linked(chain, "complete").tolist() == [0, 0, 1]
    assert linked(chain, "greedy").tolist() == [0, 0, 1]
    star = graph(3, (0, 1), (0, 2))  # the middle text comes first
    assert linked(star, "greedy").tolist() == [0, 0, 0]
    assert linked(star, "complete").tolist() == [0, 0, 1]
    assert linked(graph(9, *((i, i + 1) for i in range(8))), "single").tolist() == [0] * 9
    assert linked(graph(4, (0, 2), (1, 3)), "single").tolist() == [0, 1, 0, 1]
    assert class_sizes(np.array([0, 1, 0])).tolist() == [2, 1, 2]
    assert [len(linked(graph(0), kind)) for kind in ("single", "complete", "greedy")] == [0, 0, 0]


def test_short_texts_are_compared_by_their_words() -> None:
    assert short_texts_equal("the cat", "The Cat") is True
    assert short_texts_equal("a b c d e", "a b x") is False  # 4 >= 5 does not hold
    assert short_texts_equal("a b c d", "a b x") is True
    assert short_texts_equal("", "") is True
    assert short_texts_equal("a b c d e f", "a") is None


def test_the_classifier_is_asked_once_of_each_pair_of_different_long_texts() -> None:
    long = [f"one two three four five {i}" for i in range(3)]
    pairs = Listed(alike=[(long[0], long[2])], asked=[])
    texts = [long[0], long[1], long[2], long[1], "short"]
    found = asyncio.run(Partition(pairs=pairs).classes(texts))
    assert found.tolist() == [0, 1, 0, 1, 2]
    assert sorted(pairs.asked) == sorted(
        [(long[0], long[1]), (long[0], long[2]), (long[1], long[2]), (long[2], long[1])]
        + [(text, "short") for text in long]
    )


def test_the_worked_example_of_the_method(score: Score) -> None:
    texts = ["a1", "a2", "a3", "a4", "b1", "b2", "c1", "d1"]
    right = Darling(quality=Format(pattern=r"\w\d"), distinctness=ByClasses(partition=LETTERS))
    scores = score(right, texts)
    reward = scores.parts["darling"]
    np.testing.assert_allclose(reward, [4 / 7] * 4 + [6 / 7] * 2 + [1, 1], rtol=1e-12)
    np.testing.assert_allclose((reward - reward.mean())[[0, 4, 6]], [-0.1786, 0.1071, 0.25], atol=5e-5)
    assert scores.parts["log/class"].tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert scores.parts["log/classes"].tolist() == [4] * 8
    wrong = Darling(quality=Format(pattern=r"[^a]\d"), distinctness=ByClasses(partition=LETTERS))
    reward = score(wrong, texts).parts["darling"]
    np.testing.assert_allclose((reward - reward.mean())[[0, 4, 6]], [-0.4643, 0.3929, 0.5357], atol=5e-5)


def test_equal_right_answers_have_the_floor_and_a_group_of_one_is_distinct(score: Score) -> None:
    reward = Darling(quality=Format(pattern="a"), distinctness=ByClasses(partition=LETTERS))
    assert score(reward, ["a"] * 4).parts["darling"].tolist() == [0.1] * 4
    assert score(reward, ["a"]).parts["darling"].tolist() == [1.0]
    assert score(reward, []).parts["darling"].tolist() == []


def test_classes_may_be_made_of_correct_rollouts_alone(score: Score) -> None:
    measure = ByClasses(partition=LETTERS, correct_only=True)
    reward = Darling(quality=Format(pattern=r"[ab]"), distinctness=measure)
    found = score(reward, ["a", "a", "b", "x"])
    np.testing.assert_allclose(found.parts["log/distinctness"], [0.5, 0.5, 1.0, 0.1])
    assert found.parts["log/class"].tolist() == [0, 0, 1, -1] and found.parts["log/classes"].tolist() == [2] * 4
    assert score(reward, ["a", "x", "y"]).parts["log/distinctness"].tolist() == [0.1] * 3
    squashed = ByClasses(partition=LETTERS, sigmoid=True)
    values, _ = asyncio.run(squashed.measure(group_of("a", "b"), np.ones(2, bool)))
    np.testing.assert_allclose(values, [1 / (1 + math.exp(-1))] * 2)


def group_of(*texts: str, logprobs: Sequence[Sequence[float]] | None = None) -> list[Rollout]:
    prompt = Prompt(id="p", text="?")
    streams = [np.asarray(x, np.float32) for x in (logprobs or [[0.0]] * len(texts))]
    return [
        Rollout(
            prompt=prompt, tokens=np.zeros(len(x), np.int32), sampler_logprobs=x, mask=np.ones(len(x), bool),
            versions=np.zeros(len(x), np.int32), finish="stop", text=text,
        )
        for text, x in zip(texts, streams)
    ]  # fmt: skip


def test_ngrams_of_ones_own_are_counted_over_positions() -> None:
    texts = ["a b c", "a b d d", "z"]
    values, classes = asyncio.run(ByNgrams(n=2).measure(group_of(*texts), np.ones(3, bool)))
    np.testing.assert_allclose(values, [1 / 2, 2 / 3, 0.0])
    assert classes is None
    values, _ = asyncio.run(ByNgrams(n=1).measure(group_of("d d d a", "a"), np.ones(2, bool)))
    np.testing.assert_allclose(values, [1 / 4, 0.0])


def test_unlikely_responses_are_distinct() -> None:
    rollouts = group_of("", "", "", logprobs=[[-1.0, -3.0], [-4.0], [-1.0, -1.0, -1.0]])
    values, _ = asyncio.run(ByLogprob().measure(rollouts, np.ones(3, bool)))
    np.testing.assert_allclose(values, [1 / 3, 1.0, 0.0])
    values, _ = asyncio.run(ByLogprob().measure(group_of("", ""), np.ones(2, bool)))
    assert values.tolist() == [0.5, 0.5]


def minus(prompt: Prompt, text: str) -> float:
    return {"a": -3.0, "b": -1.0, "c": math.nan}[text]


def test_negative_qualities_are_refused_shifted_or_squashed(score: Score) -> None:
    quality, measure = Wrap(function=minus), ByClasses(partition=LETTERS)
    texts = ["a", "a", "b"]  # distinctness 1/2, 1/2, 1
    with pytest.raises(ValueError, match=r"a quality of -3.0 .* set Darling.negative to 'group_minimum'"):
        score(Darling(quality=quality, distinctness=measure), texts)

    def of(**options: str) -> list[float]:
        return score(Darling(quality=quality, distinctness=measure, **options), texts).parts["darling"].tolist()

    assert of(negative="group_minimum") == [0.0, 0.0, 2.0]
    assert of(negative="raw") == [-1.5, -1.5, -1.0]
    np.testing.assert_allclose(of(negative="sigmoid"), [0.5 / (1 + math.exp(3))] * 2 + [1 / (1 + math.exp(1))])


def test_a_sum_weighs_and_may_normalise_in_the_group(score: Score) -> None:
    quality, measure = Wrap(function=minus), ByClasses(partition=LETTERS)
    plain = Darling(quality=quality, distinctness=measure, combine="sum", quality_weight=2.0, distinctness_weight=4.0)
    assert score(plain, ["a", "a", "b"]).parts["darling"].tolist() == [-4.0, -4.0, 2.0]
    alone = Darling(quality=quality, distinctness=measure, combine="sum", distinctness_weight=0.0)
    assert score(alone, ["a", "b"]).parts["darling"].tolist() == [-3.0, -1.0]
    scaled = Darling(quality=quality, distinctness=measure, combine="sum", normalise=True)
    half = 1 / math.sqrt(2)  # (x - mean) / deviation of 0, 0, 1
    np.testing.assert_allclose(score(scaled, ["a", "a", "b"]).parts["darling"], [-2 * half, -2 * half, 4 * half])
    assert score(scaled, ["a", "a"]).parts["darling"].tolist() == [0.0, 0.0]


def test_rollouts_without_a_quality_leave_the_group_they_would_be_measured_in(group: MakeGroup) -> None:
    reward = Darling(quality=Wrap(function=minus), distinctness=ByClasses(partition=LETTERS), negative="raw")
    found = group(reward, ["b", "c", "a"])
    assert found.valid().tolist() == [True, False, True]
    assert found.total().tolist() == [-1.0, 0.0, -3.0]


def test_a_classifier_that_is_down_makes_the_group_invalid_and_keeps_its_quality(group: MakeGroup) -> None:
    measure = ByClasses(partition=Partition(pairs=Broken(), short_words=0))
    found = group(Darling(quality=Format(pattern="a"), distinctness=measure), ["a", "b"])
    assert found.valid().tolist() == [False, False]
    assert found.scores.parts["log/quality"].tolist() == [1, 0]


def test_offline_measures_of_likeness() -> None:
    pairs = [("a b c", "B C d"), ("", ""), ("a", "")]
    assert asyncio.run(SharedWords().similar(pairs)) == [0.5, 1.0, 0.0]
    same = SameText(pattern=r"<answer>(.*?)</answer>")
    texts = [("x <answer> 5</answer>", "y <answer>5</answer>"), ("<answer>5</answer>", "5 "), ("5", "6")]
    assert asyncio.run(same.similar(texts)) == [1.0, 1.0, 0.0]


def test_bad_options_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"Partition.threshold must be in \[0, 1\) .*got 1.5"):
        Partition(pairs=SharedWords(), threshold=1.5)
    with pytest.raises(ValueError, match=r"Darling.normalise centres what is added"):
        Darling(quality=Format(pattern="a"), distinctness=ByNgrams(), normalise=True)
