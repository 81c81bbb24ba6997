"""The generate route: the messages of clients as they were recorded, what is honoured, and what is refused."""

import asyncio
import json

import numpy as np
import pytest
from agents.gateways import talking
from agents.scripted import Scripted, check_branches, random_script

from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.experience import SamplingParams

PATH = "/inference/v1/generate"
SETTINGS = SamplingParams(max_tokens=6, stop_token_ids=(9,))
# As renderers 0.1.12 sends it for verifiers 0.4.0: the second request of a conversation.
RECORDED = {
    "temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "seed": 5, "routed_experts_prompt_start": 4, "stop_token_ids": [9, 8],
    "logprobs": 1, "skip_special_tokens": False,
}  # fmt: skip


def said(*tokens: int) -> Scripted:
    return Scripted(lambda *_: tokens)


def posted(body, sampler=None, *, config=None, **limits):
    """Status, JSON, session and sampler of one request."""
    sampler = sampler or said(5, 6, 8)

    async def main():
        async with talking(sampler, settings=SETTINGS, config=config, **limits) as talk:
            status, _, answer = await talk.post(PATH, body)
            return status, answer, talk.session, sampler

    return asyncio.run(main())


def test_a_recorded_request_gets_what_clients_of_both_ages_read():
    body = {"model": "policy", "token_ids": [3, 1, 4], "sampling_params": RECORDED, "cache_salt": "7"}
    status, answer, session, sampler = posted(body)
    assert status == 200 and answer["request_id"] and session.ignored == {"cache_salt": 1}
    logprobs = sampler.asked[0][1].logprobs.astype(float).tolist()
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": [5, 6, 8],
            "finish_reason": "stop",
            "stop_reason": 8,
            "logprobs": {
                "content": [
                    {
                        "token": f"token_id:{t}",
                        "token_id": t,
                        "logprob": x,
                        "rank": None,
                        "bytes": None,
                        "top_logprobs": [],
                    }
                    for t, x in zip([5, 6, 8], logprobs)
                ]
            },
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "3", "start": 0, "end": 3}],
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    (used,) = sampler.settings
    assert (used.max_tokens, used.stop_token_ids) == (6, (9, 8))


def test_tokens_are_bounded_by_the_run_the_session_and_the_context():
    for asked, limits, expected in (
        ({}, {}, 6),
        ({"max_tokens": 2}, {}, 2),
        ({"max_tokens": 100}, {}, 6),
        ({}, {"max_length": 7}, 4),
        ({}, {"max_tokens": 3}, 3),
    ):
        status, answer, _, sampler = posted(
            {"token_ids": [3, 1, 4], "sampling_params": asked}, said(1, 2, 3, 4, 5, 6, 7), **limits
        )
        assert status == 200 and sampler.settings[0].max_tokens == expected
        assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["stop_reason"] is None


def test_versions_are_spans():
    class Mixed(Scripted):
        async def sample(self, prefixes, n, settings, seeds):
            async for _, (done,) in super().sample(prefixes, n, settings, seeds):
                done.versions[:] = (4, 4, 7)
                yield 0, [done]

    _, answer, _, _ = posted({"token_ids": [3]}, Mixed(lambda *_: [5, 6, 8]))
    assert answer["choices"][0]["weight_versions"] == [
        {"version": "4", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}
    ]  # fmt: skip


def test_several_completions_are_siblings():
    status, answer, session, sampler = posted(
        {"token_ids": [3, 1], "sampling_params": {"n": 3}, "return_token_ids": True}, Scripted(random_script(8))
    )
    assert status == 200 and answer["prompt_token_ids"] == [3, 1]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) == len(session.branches()) == 3
    check_branches(session.branches(), sampler)


def test_a_stream_is_cut_from_the_answer():
    status, text, _, _ = posted({"token_ids": [3, 1], "sampling_params": {"n": 2}, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    assert [[c["index"] for c in e["choices"]] for e in events] == [[0], [1], []]
    assert [c["token_ids"] for e in events for c in e["choices"]] == [[5, 6, 8]] * 2
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_draws_of_trained_sessions_are_the_runs():
    asked = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.1, "presence_penalty": 0.0, "ignore_eos": True}
    body = {"token_ids": [3], "sampling_params": asked}
    _, _, session, sampler = posted(body)
    assert session.ignored == {"temperature": 1, "min_p": 1, "ignore_eos": 1}
    assert sampler.settings[0].temperature == 1.0
    _, _, session, sampler = posted(body, trained=False)
    assert session.ignored == {"ignore_eos": 1}
    assert (sampler.settings[0].temperature, sampler.settings[0].min_p) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [1, 2**31]}, "token_ids"),
        ({"token_ids": [1, True]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [1], "prompt": "Hi"}, "prompt"),
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "output_mode": "text"}, "output_mode"),
        ({"token_ids": [1], "sampling_params": "x"}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"mirostat": 2}}, "mirostat"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ({"token_ids": [1], "sampling_params": {"n": 65}}, "n"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, "stop_token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"token_ids": [1], "model": "other"}, "model"),
    ],
)
def test_wrong_requests_are_told_their_field(body, field):
    status, answer, session, _ = posted(body, max_length=30)
    assert status == (404 if field == "model" else 400) and answer["error"]["param"] == field, answer
    assert not session.calls


def test_a_prompt_without_room_is_told_the_context():
    status, answer, session, _ = posted({"token_ids": [1] * 30}, max_length=30)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded" and not session.calls
    assert posted({"token_ids": [1] * 29}, max_length=30)[0] == 200


def test_what_a_sampler_calls_wrong_is_the_requests_fault():
    class Refusing(Scripted):
        def sample(self, prefixes, n, settings, seeds):
            raise ValueError("prefix 0 holds token ids 3..900, the policy knows 0..23")

    status, answer, session, _ = posted({"token_ids": [3, 900]}, Refusing(lambda *_: []))
    assert status == 400 and "0..23" in answer["error"]["message"] and not session.calls


def test_a_setting_lets_unknown_parameters_pass():
    body = {"token_ids": [1], "sampling_params": {"mirostat": 2}}
    assert posted(body, config=Gateway(passed=("mirostat",)))[0] == 200


def test_a_values_that_cannot_be_drawn_with_is_refused_where_it_would_count():
    body = {"token_ids": [1], "sampling_params": {"top_p": 1.5}}
    status, answer, _, _ = posted(body, trained=False)
    assert status == 400 and "top_p" in answer["error"]["message"]
    status, _, session, _ = posted(body)
    assert status == 200 and session.ignored == {"top_p": 1}


def test_seeds_of_requests_make_equal_calls_draw_alike():
    async def main():
        async with talking(Scripted(random_script(1000)), settings=SETTINGS) as talk:

            async def tokens(**more):
                body = {"token_ids": [1, 2], "sampling_params": more}
                return (await talk.post(PATH, body))[2]["choices"][0]["token_ids"]

            one, again, other, none, next_one = (
                await tokens(seed=3), await tokens(seed=3), await tokens(seed=4), await tokens(), await tokens()
            )  # fmt: skip
            assert one == again != other and none != next_one != one
            return np.asarray(one).tolist()

    assert asyncio.run(main()) == asyncio.run(main())
