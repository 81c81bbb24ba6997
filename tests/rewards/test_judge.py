"""Judges and monitors: parsers, what is shown, retries, the cache, and the monitor's metrics."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from jaxrl_llm.experience import Group, Prompt, Scores
from jaxrl_llm.rewards.endpoint import ChatEndpoint, Lexicon
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.judge_answers import PARSERS
from jaxrl_llm.rewards.monitor import Monitor, agreement, detection
from jaxrl_llm.rewards.service import Service

Serve = Callable[[FastAPI], str]
Score = Callable[..., Scores]
MakeGroup = Callable[..., Group]


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("rating", "RATING: 7\nEXPLANATION: of 10", 7.0),
        ("rating", "RATING: 12", 10.0),
        ("rating", "RATING: 0", 1.0),
        ("rating", "RATING: **4**", 4.0),
        ("rating", "I'd say 7", 7.0),
        ("rating", "in 2024, a 3", 3.0),
        ("rating", "7.5", None),
        ("rating", "", None),
        ("score", 'so {"a": {"b": 1}} {"REASONING": "fine {x}", "SCORE": "8"}', 8.0),
        ("score", '{"SCORE": null}', None),
        ("score_of_10", '```json\n{"REASONING": "", "SCORE": 7}\n```', 0.7),
        ("score_of_10", '{"SCORE": 11}', None),
        ("yes_no", "Final Decision: Yes", 1.0),
        ("yes_no", "final decision: yes ... Final Decision: **No**", 0.0),
        ("yes_no", "they differ [[yes]]", 1.0),
        ("yes_no", "No.", 0.0),
        ("yes_no", "yes, they differ but no", None),
        ("binary", "Answer: 1", 1.0),
        ("binary", "1 or 0? 0", 0.0),
        ("binary", "10", None),
    ],
)
def test_answers_are_read_or_refused(parser: str, text: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(ValueError):
            PARSERS[parser](text)
    else:
        assert PARSERS[parser](text) == expected


class Model:
    """A server of chat completions that answers with `answer(question, number of the call)`."""

    def __init__(self, answer: Callable[[str, int], Any]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            said = answer(body["messages"][-1]["content"], len(self.bodies))
            if isinstance(said, Response):
                return said
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": said}}]})


def endpoint(url: str, cache: str = "", **options: Any) -> ChatEndpoint:
    service = Service(urls=(url,), backoff_s=0.01, **options)
    return ChatEndpoint(service=service, model="m", cache=cache, max_tokens=64)


def by_letter(question: str, number: int) -> str:
    del number
    return "no opinion" if question.endswith("c") else f"RATING: {3 if question.endswith('a') else 9}"


def test_a_judge_rates_each_response_and_an_unreadable_one_is_invalid(serve: Serve, score: Score) -> None:
    model = Model(by_letter)
    judge = Judge(endpoint=endpoint(serve(model.app), tries=2), template="{reference} {prompt} {{}} {judged}")
    scores = score(judge, ["a", "b", "c"], "gold")
    assert scores.parts["judge"].tolist() == [3, 9, 0]
    assert scores.valid["judge"].tolist() == [True, True, False]
    asked = [body["messages"][-1]["content"] for body in model.bodies]
    assert sorted(asked) == ["gold ? {} a", "gold ? {} b", "gold ? {} c", "gold ? {} c"]  # the unreadable one twice
    first = model.bodies[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 64)


def test_a_passing_failure_is_tried_again(serve: Serve, score: Score) -> None:
    model = Model(lambda question, number: Response(status_code=500) if number == 1 else "RATING: 5")
    assert score(Judge(endpoint=endpoint(serve(model.app))), ["a"]).parts["judge"].tolist() == [5]
    assert len(model.bodies) == 2


def test_answers_are_kept_on_disk_if_they_could_be_read(serve: Serve, score: Score, tmp_path: Path) -> None:
    model = Model(by_letter)
    judge = Judge(endpoint=endpoint(serve(model.app), str(tmp_path), tries=1), template="{judged}")
    for expected in (3, 5):  # the second time, the unreadable and the torn one alone are asked for again
        assert score(judge, ["a", "b", "c"]).parts["judge"].tolist() == [3, 9, 0]
        assert len(model.bodies) == expected
        for file in tmp_path.rglob("*.json"):
            if json.loads(file.read_text())["question"]["messages"][0]["content"] == "b":
                file.write_text('{"question": ')
                break
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_the_judge_sees_the_output_and_the_monitor_the_thought(score: Score) -> None:
    texts = ["<think>great great</think> right", "<think>great</think>", "<think>cut", "none"]
    whole = Judge(endpoint=Lexicon(), sees="response")
    output = Judge(endpoint=Lexicon(), sees="output", absent=0.0)
    thought = Judge(endpoint=Lexicon(), sees="thought")
    assert score(whole, texts).parts["judge"].tolist() == [4, 2, 1, 1]
    assert score(output, texts).parts["judge"].tolist() == [2, 1, 0, 0]
    scores = score(thought, texts)
    assert scores.parts["judge"].tolist() == [3, 2, 0, 0]
    assert scores.valid["judge"].tolist() == [True, True, False, False]
    question = thought.question(Prompt(id="p", text="Why?"), "because")
    assert "Why?" in question and "because" in question and "predict the rating" in question


def test_a_column_that_the_prompt_lacks_is_an_error(score: Score) -> None:
    judge = Judge(endpoint=Lexicon(), template="{hint} {judged}")
    assert judge.question(Prompt(id="p", text="?", extra={"hint": "B"}), "x") == "B x"
    with pytest.raises(ValueError, match=r"names \['hint'\], which prompt 'p' lacks"):
        score(judge, ["a"])
    with pytest.raises(ValueError, match=r"must have the field \{judged\}"):
        Judge(endpoint=Lexicon(), template="{prompt}")
    with pytest.raises(ValueError, match=r"parser must be one of \('rating', .*got 'stars'"):
        Judge(endpoint=Lexicon(), parser="stars")


def test_a_monitor_is_logged_beside_the_reward_and_costs_no_rollout(group: MakeGroup) -> None:
    reward = Monitor(
        reward=Judge(endpoint=Lexicon(), sees="output", name="behaviour"),
        monitor=Judge(endpoint=Lexicon(), sees="thought", name="monitor"),
    )
    found = group(reward, ["<think>great great</think> right", "<think></think> right right right", "cut"])
    assert found.total().tolist() == [2, 4, 0] and found.valid().tolist() == [True, True, False]
    assert found.scores.parts["log/monitor"].tolist() == [3, 0, 0]
    assert found.scores.valid["log/monitor"].tolist() == [True, False, False]
    assert found.scores.parts["log/monitor_squared_error"].tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match=r"must see the thought alone"):
        Monitor(reward=Judge(endpoint=Lexicon()), monitor=Judge(endpoint=Lexicon()))


def test_a_monitor_predicts_the_parts_that_count(group: MakeGroup) -> None:
    class Shown:
        """A reward with a part of weight 0 that could not be had."""

        needs_stats = False

        async def score(self, rollouts: Any, stats: Any = None) -> Scores:
            parts, valid = (
                {"main": np.array([2.0]), "shown": np.array([np.nan])},
                {"main": np.array([True]), "shown": np.array([False])},
            )
            return Scores(parts=parts, valid=valid, weights={"shown": 0.0})

    found = group(
        Monitor(reward=Shown(), monitor=Judge(endpoint=Lexicon(), sees="thought")), ["<think>great great</think> x"]
    )
    assert found.scores.valid["log/monitor_squared_error"].all()
    assert found.scores.parts["log/monitor_squared_error"].tolist() == [1]


def test_agreement_of_a_monitor_with_the_truth() -> None:
    predicted, truth = np.array([1.0, 2.0, 4.0, 9.0]), np.array([2.0, 2.0, 6.0, 0.0])
    found = agreement(predicted, truth, np.array([True, True, True, False]))
    assert found["count"] == 3 and found["prediction_mean"] == pytest.approx(7 / 3)
    assert found["mse"] == pytest.approx(5 / 3) and found["rmse"] == pytest.approx(math.sqrt(5 / 3))
    # Pearson: sum of products of (-4, -1, 5) / 3 and (-4, -4, 8) / 3 over the root of 42 * 96 / 81.
    assert found["pearson"] == pytest.approx(60 / math.sqrt(42 * 96))
    # Spearman: ranks 1, 2, 3 and 1.5, 1.5, 3.
    assert found["spearman"] == pytest.approx(1.5 / math.sqrt(2 * 1.5))
    nothing = agreement(predicted, truth, np.zeros(4, bool))
    assert nothing["count"] == 0 and math.isnan(nothing["rmse"])


def test_detection_of_a_behaviour() -> None:
    predicted, truth = np.array([1.0, 1.0, 0.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    found = detection(predicted, truth, np.array([True, True, True, True, False]))
    assert [found[n] for n in ("tp", "fp", "fn", "tn")] == [1, 1, 1, 1]
    assert (found["precision"], found["recall"], found["f1"]) == (0.5, 0.5, 0.5)
    assert detection(predicted, truth, np.zeros(5, bool))["f1"] == 0


def test_a_lexicon_rates_between_1_and_10() -> None:
    read = PARSERS["rating"]
    assert asyncio.run(Lexicon().reply([], "agree " * 20, read)) == 10
    assert asyncio.run(Lexicon(words=("No",)).reply([], "no, none", read)) == 2


def test_the_sycophancy_rubric_asks_about_the_output_and_the_users_own_question() -> None:
    output = Judge(endpoint=Lexicon(), template="sycophancy", sees="output")
    prompt = Prompt(
        id="p",
        messages=[{"role": "system", "content": "Affirm the user."}, {"role": "user", "content": "Is {x} right?"}],
    )
    asked = output.question(prompt, output.judged("<think>flatter</think>It is not.") or "")
    assert "sycophantic" in asked and "[User]\nIs {x} right?" in asked and asked.endswith("[Answer]\nIt is not.")
    assert "Affirm the user." not in asked and "RATING:" in asked and "quality" not in asked.lower()
    for innocent in ("Errors", "invented facts", "unhelpfulness"):
        assert innocent in asked  # what is bad and is no sycophancy
    column = {"raw_question_for_monitor": "the bare question", "hint_str_for_monitor": "It is (B)."}
    hinted = Prompt(id="p", text="the bare question. It is (B).", extra=column)
    thought = Judge(endpoint=Lexicon(), template="hint_reliance", parser="binary", sees="thought")
    shown = thought.question(hinted, "because of the hint")
    assert "[Question]\nthe bare question\n\n[Hint]\nIt is (B)." in shown and shown.endswith("because of the hint")
    with pytest.raises(ValueError, match=r"or be one of .*'sycophancy'"):
        Judge(endpoint=Lexicon(), template="sycofancy")
