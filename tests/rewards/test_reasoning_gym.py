"""reasoning-gym's tasks as a source, and its own verifier as their reward."""

from collections.abc import Callable

import pytest

from jaxrl_llm.data.procedural import ReasoningGym as Source
from jaxrl_llm.experience import Scores
from jaxrl_llm.rewards.reasoning_gym import ReasoningGym

Score = Callable[..., Scores]


def test_the_verifier_scores_its_own_answers_1_and_partial_ones_less(score: Score) -> None:
    row = Source(task="spell_backward", size=1, config={"min_word_len": 5}).rows()[0]
    word = row.extra["entry"]["metadata"]["word"]
    assert row.reference == word[::-1] and word in (row.messages or [{}])[0]["content"]
    reward = ReasoningGym(workers=1)
    tagged = ReasoningGym(workers=1, answer="tag")
    try:
        scores = score(reward, [word[::-1], f" {word[::-1]}\n", "", "?"], row.reference, row.extra)
        assert scores.parts["reasoning_gym"].tolist()[:3] == [1, 1, 0] and scores.parts["reasoning_gym"][3] < 1
        scores = score(tagged, [f"<answer>{word[::-1]}</answer>", word[::-1]], row.reference, row.extra)
        assert scores.parts["reasoning_gym"].tolist() == [1, 0] and scores.valid["reasoning_gym"].all()
    finally:
        reward.close()
        tagged.close()


def test_rows_of_another_source_are_an_error_that_names_the_right_one(score: Score) -> None:
    with pytest.raises(ValueError, match=r"has no \['config', 'entry', 'task'\].*procedural.ReasoningGym"):
        score(ReasoningGym(workers=1), ["a"])


def test_training_and_held_out_questions_are_disjoint_for_every_seed() -> None:
    def questions(split: str, seed: int) -> set[str]:
        options = {"task": "basic_arithmetic", "size": 150, "seed": seed, "split": split, "heldout_share": 0.3}
        source = Source(**options)  # type: ignore[arg-type]
        return {row.extra["entry"]["question"] for row in source.rows()}

    assert not (questions("train", 0) | questions("train", 1)) & (questions("heldout", 0) | questions("heldout", 1))
    assert questions("train", 0) == questions("train", 0) != questions("train", 1)


def test_every_row_has_the_fields_of_its_task() -> None:
    rows = Source(task="leg_counting", size=5, template="question_only").rows()
    assert [row.id for row in rows] == [f"leg_counting/train/{i}" for i in range(5)]
    assert all(row.text == row.extra["entry"]["question"] and row.source == "leg_counting" for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "spell_backwards"}, r"none of reasoning-gym's \d+; did you mean \['spell_backward'"),
        ({"task": "spell_backward", "config": {"length": 3}}, r"does not take ReasoningGym.config=\{'length': 3\}"),
        ({"task": "spell_backward", "config": {"seed": 3}}, r"config must not hold \['seed'\]"),
        ({"task": "spell_backward", "size": 0}, "size must be >= 1"),
        ({"task": "spell_backward", "template": "qwen4"}, r"template must be one of .*'r1_zero'.*got 'qwen4'"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Source(**options).rows()  # type: ignore[arg-type]
