"""The weighted sum keeps its parts, and a reward that fails takes no other with it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from jaxrl_llm.experience import Group, Rollout, Scores
from jaxrl_llm.protocols import Reward
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.format import Format
from jaxrl_llm.rewards.weighted import Weighted

MakeGroup = Callable[..., Group]


@dataclass(frozen=True, kw_only=True)
class TwoParts:
    """Two parts, one logged value, and a weight of its own."""

    needs_stats: ClassVar[bool] = True

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        ones = np.ones(len(rollouts))
        sure = ones > 0
        parts = {"a": ones, "b": 2 * ones, "log/length": 7 * ones}
        return Scores(parts=parts, valid={"a": sure, "b": ~sure, "log/length": sure}, weights={"a": 0.5})


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Never answers, or raises at once."""

    needs_stats: ClassVar[bool] = False
    raises: bool = False

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        if self.raises:
            raise OSError("the service is down")
        await asyncio.sleep(60)
        raise AssertionError


def totals(group: MakeGroup) -> tuple[list[float], list[bool]]:
    return group.total().tolist(), group.valid().tolist()


def test_the_total_is_the_weighted_sum_of_named_parts(group: MakeGroup) -> None:
    reward = Weighted(parts={"answer": Exact(), "form": Format(pattern=r"\d+")}, weights={"form": 0.25})
    result = group(reward, ["132", "131", "no"], "132")
    assert {name: values.tolist() for name, values in result.scores.parts.items()} == {
        "answer": [1, 0, 0],
        "form": [1, 1, 0],
    }
    assert totals(result) == ([1.25, 0.25, 0.0], [True, True, True])


def test_a_reward_of_several_parts_keeps_them_apart(group: MakeGroup) -> None:
    result = group(Weighted(parts={"two": TwoParts()}, weights={"two": 3.0}), ["", ""])
    assert set(result.scores.parts) == {"two/a", "two/b", "log/two/length"}
    assert result.scores.weights == {"two/a": 1.5, "two/b": 3.0}
    assert totals(result) == ([1.5, 1.5], [False, False])


@pytest.mark.parametrize("stuck", [Stuck(), Stuck(raises=True)])
def test_a_late_or_failing_reward_is_invalid_and_leaves_the_others(group: MakeGroup, stuck: Reward) -> None:
    reward = Weighted(parts={"answer": Exact(), "service": stuck}, limit_s=0.2)
    result = group(reward, ["132", "1"], "132")
    assert result.scores.parts["answer"].tolist() == [1, 0] and result.scores.valid["answer"].all()
    assert not result.scores.valid["service"].any()
    assert totals(result)[1] == [False, False]


def test_a_failing_reward_of_weight_0_costs_no_rollout(group: MakeGroup) -> None:
    reward = Weighted(parts={"answer": Exact(), "service": Stuck(raises=True)}, weights={"service": 0.0})
    assert totals(group(reward, ["132", "1"], "132")) == ([1.0, 0.0], [True, True])


def test_statistics_are_asked_for_if_a_part_needs_them() -> None:
    assert Weighted(parts={"a": Exact(), "b": TwoParts()}).needs_stats
    assert not Weighted(parts={"a": Exact()}).needs_stats
    assert isinstance(Weighted(parts={"a": Exact()}), Reward)


def test_bad_options_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"names \['form'\], and Weighted.parts has \['answer'\]"):
        Weighted(parts={"answer": Exact()}, weights={"form": 1.0})
    with pytest.raises(ValueError, match=r"must not use the names \['log'\]"):
        Weighted(parts={"log": Exact()})
    with pytest.raises(ValueError, match=r"there must be one"):
        Weighted(parts={})
