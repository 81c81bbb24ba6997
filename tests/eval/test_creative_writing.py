"""EQ-Bench's creative writing: prompts with seeds, ratings by criteria, the score and its bootstrap interval."""

import asyncio
import json

import numpy as np
import pytest
from builders import make_prompt, make_rollout
from records_of import answered

from jaxrl_llm.eval.creative_writing import CreativePrompts, CreativeScore
from jaxrl_llm.rewards.rubric import CRITERIA, LOWER_IS_BETTER, Rubric

PIECE = "word " * 120


class Says:
    """An endpoint with one answer; keeps what it was asked."""

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = answer, []

    async def reply(self, messages, judged, read):
        self.asked.append((messages, judged))
        return read(self.answer)


def rating(numbers) -> str:
    return "[Analysis]\nElegant Prose: 3\n[Scores]\n" + "\n".join(f"{n}: {x}" for n, x in numbers.items())


def test_the_prompts_take_their_seeds_in_turn(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(
        json.dumps(
            {
                "1": {"writing_prompt": "Write. <SEED> Short.", "seed_modifiers": ["A", "B"]},
                "2": {"writing_prompt": "More."},
            }
        )
    )
    prompts = CreativePrompts(path=str(file)).rows()
    assert [(p.id, p.extra["instruction"]) for p in prompts[:4]] == [
        ("creative_writing/1/0", "Write. A Short."), ("creative_writing/1/1", "Write. B Short."),
        ("creative_writing/1/2", "Write. A Short."), ("creative_writing/2/0", "More."),
    ]  # fmt: skip
    assert len(prompts) == 6
    for bad in ("[1]", "{", '{"1": {"prompt": "x"}}'):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"prompts.json"):
            CreativePrompts(path=str(file)).rows()


def test_the_published_prompts_are_read(real_data):
    prompts = CreativePrompts(path=str(real_data / "creative" / "creative_writing_prompts_v1.json")).rows()
    assert len(prompts) == 3 * len({p.extra["task"] for p in prompts}) > 30
    assert not any("<SEED>" in p.extra["instruction"] for p in prompts)


def test_there_are_22_criteria_and_a_lower_rating_is_better_for_9():
    assert len(set(CRITERIA)) == 22 and len(set(LOWER_IS_BETTER)) == 9 and set(LOWER_IS_BETTER) < set(CRITERIA)


def test_a_piece_is_worth_the_mean_of_its_ratings_with_nine_turned_round():
    random = np.random.default_rng(0)
    numbers = dict(zip(CRITERIA, random.integers(0, 21, 22).tolist()))
    expected = np.mean([20 - x if n in LOWER_IS_BETTER else x for n, x in numbers.items()])
    endpoint = Says(rating(numbers))
    prompt = make_prompt("p", extra={"instruction": "the {prompt}"})
    scores = asyncio.run(Rubric(endpoint=endpoint).score([make_rollout(prompt, [1], text=PIECE)]))
    assert scores.parts["rubric"].tolist() == [pytest.approx(expected)] and scores.valid["rubric"].all()
    ((message,), judged) = endpoint.asked[0]
    assert "the {prompt}" in message["content"] and PIECE in message["content"] and judged == PIECE


@pytest.mark.parametrize(
    ("line", "number"),
    [("**Coherent**: 12", 12), ("- Coherent: [7.5]", 7.5), ("3. Coherent: 12/20", 12), ("coherent: 20", 20), ("Coherent: 25", None), ("Incoherent: 3", None), ("Coherent: twelve", None)],
)  # fmt: skip
def test_ratings_are_read_in_the_forms_that_judges_write(line, number):
    assert Rubric(endpoint=Says("")).rated(f"Coherent: 1\n[Scores]\n{line}").get("Coherent") == number


def test_short_pieces_and_answers_without_ratings_are_invalid_and_not_zero():
    short = make_rollout(make_prompt(), [1], text="short")
    whole = make_rollout(make_prompt(), [1], text=PIECE)
    few = Says(rating({"Coherent": 10}))
    with pytest.raises(ValueError, match="1 criteria are rated"):
        Rubric(endpoint=few).mean(few.answer)
    full = Rubric(endpoint=Says(rating(dict.fromkeys(CRITERIA, 10))))
    scores = asyncio.run(full.score([short, whole]))
    assert scores.valid["rubric"].tolist() == [False, True] and scores.parts["rubric"][1] == 10


def test_the_score_is_five_times_the_mean_over_tasks_with_a_bootstrap_interval(tmp_path):
    ratings = {"a": [10.0, 12.0, None], "b": [4.0, 6.0, 5.0], "c": [20.0, 20.0, 20.0]}
    groups = [
        answered(f"{task}/{i}", sampled=[("", x)], parts=[{"rubric": x}], task=task)
        for task, values in ratings.items()
        for i, x in enumerate(values)
    ]
    measured = CreativeScore().measure(groups)
    assert measured["creative_score"].tolist() == [55, 25, 100] and measured["failed"] == 1
    found = CreativeScore().report(groups, tmp_path, "m")["creative_writing"]
    assert found["score"] == 60 and found["tasks"] == 3
    # A draw of the three is all "b" with chance 1/27, and all "c": more than 2.5% each.
    assert found["ci95"] == [25, 100]
