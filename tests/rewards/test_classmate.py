"""The classmate's part: types, conditions, sign, validity, and what becomes of thoughts that cannot be passed on."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from builders import make_prompt, make_rollout
from jaxtyping import TypeCheckError

from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.rewards import classmate
from jaxrl_llm.rewards.classmate import Answer, Asked, ClassmateCoT
from jaxrl_llm.rewards.thought_span import ThoughtSpan
from jaxrl_llm.rewards.wrap import Failed, part

TOKENIZER = CharTokenizer(alphabet="<>/think0123456789x").load()


@dataclass
class Digit:
    """Rates a text by its last character, a digit; "x" cannot be rated."""

    needs_stats: bool = False

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        return part("digit", [None if r.text[-1] == "x" else float(r.text[-1]) for r in rollouts])


@dataclass
class Parrot:
    """Answers with the thought's last character and, where asked for more, the ones before it.

    Attributes:
      longest: thoughts of more tokens do not fit.
      fails: whether it is down.
    """

    longest: int = 100
    fails: bool = False
    asked: list[str] = field(default_factory=list)

    async def answers(self, asked: Sequence[Asked], samples: int) -> list[list[Answer] | None]:
        if self.fails:
            raise Failed("down")
        self.asked += [one.text for one in asked]
        return [
            None if len(one.thought) > self.longest else [self._answer(one.text[-1 - i :][:1] or "1") for i in range(samples)]
            for one in asked
        ]  # fmt: skip

    def _answer(self, text: str) -> Answer:
        return Answer(text, np.array(TOKENIZER.encode(text), np.int32))

    def decode(self, tokens: np.ndarray) -> str:
        return TOKENIZER.decode(tokens)


def group(*texts: str) -> list[Rollout]:
    rollouts = [make_rollout(make_prompt(), TOKENIZER.encode(text), text=text) for text in texts]
    return [classmate.replace(r, spans=ThoughtSpan().mark(r, TOKENIZER)) for r in rollouts]


def scored(reward: ClassmateCoT, *texts: str) -> dict[str, Any]:
    """{part: values}, None where invalid."""
    scores = asyncio.run(reward.score(group(*texts)))
    return {n: [float(x) if ok else None for x, ok in zip(v, scores.valid[n])] for n, v in scores.parts.items()}


def made(**fields: Any) -> ClassmateCoT:
    return ClassmateCoT(**{"behaviour": Digit(), "sign": 1, "classmates": [Parrot()]} | fields)


WHOLE = "<think>23</think>7"  # the classmate answers 3, the policy 7
NOTHING = "<think>24</think>0"


def test_a_thought_is_worth_what_it_makes_the_classmates_do() -> None:
    found = scored(made(), WHOLE, NOTHING)
    assert found["main"] == [7, 0] and found["classmate"] == [3, 4]


def test_samples_and_classmates_are_averaged_and_weighted() -> None:
    found = scored(made(classmates=[Parrot(), Parrot()], samples=2, weight=0.5), WHOLE)
    assert found["classmate"] == [0.5 * (3 + 2) / 2]


def test_the_sign_turns_both_parts() -> None:
    found = scored(made(sign=-1), WHOLE)
    assert (found["main"], found["classmate"], found["log/behaviour"]) == ([-7], [-3], [7])


@pytest.mark.parametrize(
    ("condition", "expected", "asked"),
    [
        ("always", [3, 4], ["23", "24"]),
        ("no_classmate", [0, 0], []),
        ("no_classmate_when_main_incorrect", [3, 0], ["23"]),
        ("neg_classmate_when_main_incorrect", [3, -4], ["23", "24"]),
    ],
)
def test_conditions(condition: str, expected: list[float], asked: list[str]) -> None:
    mate = Parrot()
    assert scored(made(condition=condition, classmates=[mate]), WHOLE, NOTHING)["classmate"] == expected
    assert mate.asked == asked


def test_without_the_thought_what_it_adds_is_left() -> None:
    found = scored(made(reward_type="remove_wo_cot"), WHOLE, NOTHING)
    assert found["classmate"] == [3 - 1, 4 - 1]  # a Parrot without a thought says 1


def test_random_truncation_passes_on_a_first_part_that_the_rollout_decides() -> None:
    mates = [Parrot(), Parrot()]
    for mate in mates:
        scored(made(reward_type="random_truncate", classmates=[mate]), "<think>0123456789</think>7")
    assert mates[0].asked == mates[1].asked
    (text,) = mates[0].asked
    assert "0123456789".startswith(text) and 1 <= len(text) <= 9


@pytest.mark.parametrize(
    ("keep", "expected"), [(1.0, "01234"), (0.5, "01"), (0.01, "0"), ("first-2", "01"), ("last-2-tokens", "34")]
)
def test_what_is_kept_of_a_thought(keep: float | str, expected: str) -> None:
    mate = Parrot()
    scored(made(keep=keep, classmates=[mate]), "<think>01234</think>7")
    assert mate.asked == [expected]


def test_what_cannot_be_had_is_invalid_and_not_zero() -> None:
    texts = (WHOLE, "<think>23", "<think></think>7", "<think>2x</think>7", "<think>2345</think>x")
    found = scored(made(classmates=[Parrot(longest=3)]), *texts)
    assert found["classmate"] == [3, None, None, None, None]
    assert found["main"][-1] is None
    assert scored(made(classmates=[Parrot(fails=True)], absent=0.0), WHOLE)["classmate"] == [None]


def test_absent_is_for_thoughts_that_are_not_there_and_for_no_failure() -> None:
    found = scored(made(absent=-1.0), "<think>23", "<think></think>7", "<think>2x</think>7")
    assert found["classmate"] == [-1, -1, None]


def test_a_classmate_that_loses_answers_is_an_error() -> None:
    class Short(Parrot):
        async def answers(self, asked: Sequence[Asked], samples: int) -> list[list[Answer] | None]:
            return []

    with pytest.raises(ValueError, match="0 answers to 1 thoughts"):
        scored(made(classmates=[Short()]), WHOLE)


def test_rollouts_without_spans_name_the_binding() -> None:
    rollouts = [make_rollout(make_prompt(), [1])]
    with pytest.raises(ValueError, match=r"train\.Stage\.marker"):
        asyncio.run(made().score(rollouts))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward_type": "help_other_questions"}, "only named by the original"),
        ({"reward_type": "random_truncate_step_wise_utility"}, "only named by the original"),
        ({"reward_type": "other"}, "reward_type must be one of"),
        ({"condition": "never"}, "condition must be one of"),
        ({"classmates": ()}, "condition = 'no_classmate'"),
        ({"sign": 0}, "sign"),
        ({"keep": 0.0}, "keep must be a share"),
        ({"keep": "middle-3"}, "keep must be a share"),
    ],
)
def test_what_is_not_defined_is_refused_at_the_start(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeCheckError), match=words):
        made(**fields)


def test_the_sign_has_no_default() -> None:
    with pytest.raises(TypeError, match="sign"):
        ClassmateCoT(behaviour=Digit(), classmates=[Parrot()])  # type: ignore[call-arg]
