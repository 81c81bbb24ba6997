"""Judges ask a real server: what they send is taken, answers are read or refused, and kept."""

import asyncio

import numpy as np
import pytest
from serving import Server

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.endpoint import ChatEndpoint
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.service import Service

TEXTS = ["a short answer", "another {answer} with braces", "caf\u00e9 \U0001f600"]
ASKED = 'vllm:request_success_total{engine="0",'


def answered(server: Server) -> int:
    """Requests that the server has completed."""
    lines = [line for line in server.text("/metrics").splitlines() if line.startswith(ASKED)]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def scores(
    server: Server, url: str = "", model: str = "policy", cache: str = "", allowed: tuple[int, ...] = (0, 1)
) -> Scores:
    """Grades of TEXTS; the tokens <0> and <1> are what the parser "binary" reads."""
    endpoint = ChatEndpoint(
        service=Service(urls=(url or server.url,), tries=2, backoff_s=0.05), model=model, max_tokens=1, cache=cache,
        extra={"allowed_token_ids": list(allowed)},
    )  # fmt: skip
    judge = Judge(endpoint=endpoint, template="Is {judged} right? 0 or 1", parser="binary")
    none = np.zeros(0, np.int32)
    rollouts = [
        Rollout(
            prompt=Prompt(id="p", text="?"), tokens=none, sampler_logprobs=none.astype(np.float32), mask=none > 0, versions=none,
            finish="stop", text=text,
        )
        for text in TEXTS
    ]  # fmt: skip
    return asyncio.run(judge.score(rollouts))


def test_a_judges_answers_are_read_and_asked_for_once(
    server: Server, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    before = answered(server)
    found = scores(server, cache=str(tmp_path))
    assert found.valid["judge"].all() and set(found.parts["judge"]) <= {0.0, 1.0}
    assert answered(server) - before == len(TEXTS)
    again = scores(server, cache=str(tmp_path), url="http://127.0.0.1:9")  # nobody is there: all answers were kept
    assert again.valid["judge"].all() and again.parts["judge"].tolist() == found.parts["judge"].tolist()
    unread = scores(server, cache=str(tmp_path), allowed=(5,))
    assert not unread.valid["judge"].any() and "neither 0 nor 1 in '<5>'" in caplog.text
    assert answered(server) - before == 3 * len(TEXTS), "each unreadable answer was asked for twice"
    unknown = scores(server, model="nobody")
    assert not unknown.valid["judge"].any() and "404" in caplog.text and "`nobody` does not exist" in caplog.text
