"""Calls of services: retries, refusals, answers that cannot be used, and a service that stays down."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from jaxrl_llm.experience import Scores
from jaxrl_llm.protocols import Down
from jaxrl_llm.rewards.classifier import Classifier, Served
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.rewards.wrap import Failed

Serve = Callable[[FastAPI], str]
Score = Callable[..., Scores]


class Scripted:
    """A server of /score that gives the listed answers in turn, the last one for ever."""

    def __init__(self, *answers: Response | float) -> None:
        self.answers, self.headers, self.bodies = list(answers), [], []
        self.app = FastAPI()

        @self.app.post("/score")
        async def answer(request: Request) -> Response:
            self.headers.append(dict(request.headers))
            self.bodies.append(await request.json())
            one = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(one, float):
                await asyncio.sleep(one)
                one = JSONResponse({"scores": [1.0]})
            return one


def scores(*values: Any) -> Response:
    return JSONResponse({"scores": list(values)})


def quick(*urls: str, **options: Any) -> Service:
    return Service(urls=urls, **{"backoff_s": 0.01, "limit_s": 30.0, **options})


def number(answer: Any) -> float:
    return float(answer["scores"][0])


def post(service: Service) -> float:
    return asyncio.run(service.post("/score", {"texts": ["a"]}, number))


def test_an_answer_that_is_too_long_is_not_read_to_its_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl_llm.rewards.service.MOST_BYTES", 200_000)
    server = Scripted(Response(" " * 200_001 + '{"scores": [1]}'), scores(2.0))
    assert post(quick(serve(server.app))) == 2.0
    server = Scripted(Response(" " * 100_000 + '{"scores": [1]}'))
    assert post(quick(serve(server.app))) == 1.0


def test_errors_and_unusable_answers_are_tried_again(serve: Serve) -> None:
    server = Scripted(Response(status_code=503), Response("no json"), JSONResponse({"other": 1}), scores(2.5))
    assert post(quick(serve(server.app), tries=4)) == 2.5
    assert server.bodies == [{"texts": ["a"]}] * 4


def test_a_refusal_is_not_tried_again_and_says_why(serve: Serve) -> None:
    server = Scripted(JSONResponse({"error": "`texts` must be a list"}, 400), scores(1.0))
    with pytest.raises(Failed, match=r"/score: 400 .*`texts` must be a list"):
        post(quick(serve(server.app)))
    assert len(server.bodies) == 1


def test_calls_go_round_the_servers_and_past_a_dead_one(serve: Serve) -> None:
    first, second = Scripted(scores(1.0)), Scripted(scores(2.0))
    service = quick(serve(first.app), "http://127.0.0.1:9", serve(second.app))
    assert [post(service) for _ in range(4)] == [1.0, 2.0, 1.0, 2.0]  # every second call meets the dead one first


def test_the_wait_that_a_server_asks_for_is_kept(serve: Serve) -> None:
    server = Scripted(Response(status_code=429, headers={"Retry-After": "1"}), scores(1.0))
    began = time.monotonic()
    assert post(quick(serve(server.app))) == 1.0
    assert time.monotonic() - began >= 1


def test_a_slow_server_is_given_up_after_the_limit(serve: Serve) -> None:
    server = Scripted(2.0)
    with pytest.raises(Failed, match=r"no answer within 0.3 s \(service.Service.limit_s\) \(2 attempts\)"):
        post(quick(serve(server.app), limit_s=0.3, tries=2))


def test_the_token_is_sent_and_must_be_there(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Scripted(scores(1.0))
    service = quick(serve(server.app), token_env="REWARD_TOKEN_OF_A_TEST")
    with pytest.raises(Down, match=r"REWARD_TOKEN_OF_A_TEST is not set"):
        post(service)
    monkeypatch.setenv("REWARD_TOKEN_OF_A_TEST", "secret")
    assert post(service) == 1.0 and server.headers[-1]["authorization"] == "Bearer secret"


def test_a_server_that_stays_down_stops_the_run_unless_told_otherwise() -> None:
    dead = quick("http://127.0.0.1:9", tries=1, stop_after=3)
    for _ in range(2):
        with pytest.raises(Failed, match=r"127.0.0.1:9/score: .*\(1 attempts\)"):
            post(dead)
    with pytest.raises(Down, match=r"the last 3 calls failed; .*service.Service.stop_after = 0"):
        post(dead)
    patient = quick("http://127.0.0.1:9", tries=1, stop_after=0)
    for _ in range(5):
        with pytest.raises(Failed):
            post(patient)


def test_a_success_begins_the_count_anew(serve: Serve) -> None:
    bad, good = Response(status_code=400), scores(1.0)
    service = quick(serve(Scripted(bad, good, bad, good).app), stop_after=2)
    for _ in range(2):
        with pytest.raises(Failed):
            post(service)
        assert post(service) == 1.0


def test_missing_scores_are_invalid_alone_and_a_wrong_number_of_them_altogether(serve: Serve, score: Score) -> None:
    server = Scripted(scores(1.0, None, 2.3, -4.0), scores(1.0, 2.0))
    reward = Classifier(scorer=Served(service=quick(serve(server.app), tries=2)), maximum=1.5)
    found = score(reward, ["a", "b", "c", "d"])
    assert found.parts["classifier"].tolist() == [1.0, 0.0, 1.5, -4.0]
    assert found.valid["classifier"].tolist() == [True, False, True, True]
    found = score(reward, ["a", "b", "c"])
    assert found.valid["classifier"].tolist() == [False, False, False]


def test_a_weighted_sum_goes_on_without_a_failed_service_but_not_without_one_that_is_down(score: Score) -> None:
    dead = Classifier(scorer=Served(service=quick("http://127.0.0.1:9", tries=1, stop_after=2)))
    reward = Weighted(parts={"answer": Exact(), "service": dead})
    found = score(reward, ["7", "8"], "7")
    assert found.parts["answer"].tolist() == [1, 0] and not found.valid["service"].any()
    with pytest.raises(Down):
        score(reward, ["7"], "7")


def test_bad_addresses_are_errors_at_construction() -> None:
    for urls in ((), ("127.0.0.1:8000",), "http://127.0.0.1:8000"):
        with pytest.raises(ValueError, match=r"Service.urls must be a sequence of addresses"):
            Service(urls=urls)
    with pytest.raises(ValueError, match=r"Service.tries must be > 0 \(got 0\)"):
        Service(urls=("http://127.0.0.1:1",), tries=0)
