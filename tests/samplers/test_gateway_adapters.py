"""The gateway over the embedded sampler with loaded adapters: a request's `model` chooses who answers, and the policy alone is learned from."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from adapter_cases import PLAIN, adapted, gaps, start
from agents.gateways import Talk, talking, user
from agents.scripted import Scripted
from sampler_cases import Tiny
from test_loaded_adapters import summed

from jaxrl_llm.experience import Action, Completion, Finish, SamplingParams

GENERATE = "/inference/v1/generate"
PROMPT = (3, 1, 4)


class Numbers:
    """Renders each message as its length and a 1, and shows completions as numbers."""

    stop_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        return np.asarray([n for one in messages for n in (len(one["content"]), 1)], np.int32)

    def bridge(
        self, prior_ids: np.ndarray, finish: Finish, new_messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray | None:  # fmt: skip
        return np.concatenate([prior_ids, self.prompt(new_messages)]).astype(np.int32)

    def parse(
        self, ids: np.ndarray, *, finish: Finish = "stop", tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Action:
        return Action(text=" ".join(map(str, ids.tolist())))


def asked(tiny: Tiny, work: Any, settings: SamplingParams = PLAIN, **limits: Any) -> tuple[Any, list[Any]]:
    """What `work` returns of a session of a gateway over the policy and the sets "left" and "right"; and the three sets of adapters."""
    policies, (first, left, right) = zip(*(adapted(tiny, seed=seed) for seed in (3, 4, 5)))

    async def main() -> Any:
        engine = start(policies[0], loaded=2)
        await engine.publish(policies[0].joined(first, tiny.params), 0)
        engine.load("right", right)
        engine.load("left", left)
        try:
            async with talking(engine, Numbers(), settings=settings, **limits) as talk:
                return await work(talk)
        finally:
            await engine.close()

    return asyncio.run(main()), [first, left, right]


def drew(answer: Mapping[str, Any]) -> Completion:
    """The completion of an answer of the generate route."""
    tokens = np.asarray(answer["choices"][0]["token_ids"], np.int32)
    said = [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]
    return Completion(
        tokens=tokens, logprobs=np.asarray(said, np.float32), versions=np.zeros(len(tokens), np.int32), finish="length"
    )


def test_each_model_answers_with_its_own_adapters_on_both_routes(tiny: Tiny) -> None:
    """The log-probs of an answer are those of base plus the adapters that its model names, by the learner's forward pass."""

    async def work(talk: Talk) -> Any:
        bodies = [
            {"model": name, "token_ids": list(PROMPT), "sampling_params": {}} for name in ("policy", "left", "right")
        ]
        answers = await asyncio.gather(*(talk.post(GENERATE, body) for body in bodies))
        chats = [await talk.chat([user("abcd")], model=name, return_token_ids=True) for name in ("left", "policy")]
        return answers, chats, talk.session.calls, talk.session.branches()

    (answers, chats, calls, branches), sets = asked(tiny, work)
    assert [status for status, _, _ in (*answers, *chats)] == [200] * 5
    prompt = np.asarray(PROMPT, np.int32)
    for adapters, (_, _, answer) in zip(sets, answers, strict=True):
        assert np.abs(gaps(tiny, summed(tiny, adapters), [prompt], [[drew(answer)]])).max() < 1e-5
    assert [body["model"] for _, _, body in chats] == ["left", "policy"]
    assert [call.adapter for call in calls] == ["", "left", "right", "left", ""]
    for call, adapters in zip(calls[3:], (sets[1], sets[0]), strict=True):
        assert (
            np.abs(gaps(tiny, summed(tiny, adapters), [np.asarray([4, 1], np.int32)], [[call.completion]])).max() < 1e-5
        )
    # The policy's two answers are all that is learned from.
    learned = [calls[0].completion.tokens.tolist(), calls[4].completion.tokens.tolist()]
    assert [branch.tokens[branch.mask].tolist() for branch in branches] == learned


def test_a_conversation_with_another_model_in_between_is_one_branch(tiny: Tiny) -> None:
    async def work(talk: Talk) -> Any:
        talked = [user("ab")]
        for name in ("policy", "right", "policy"):
            status, _, body = await talk.chat(talked, model=name)
            assert status == 200
            talked += [body["choices"][0]["message"], user("abc")]
        return talk.session.calls, talk.session.branches()

    (calls, (branch,)), _ = asked(tiny, work)
    first, other, last = (call.completion.tokens.tolist() for call in calls)
    assert branch.prefix.tolist() == [2, 1] and branch.tokens.tolist() == [*first, 3, 1, *other, 3, 1, *last]
    assert branch.mask.tolist() == [True] * len(first) + [False] * (len(other) + 4) + [True] * len(last)


def test_models_are_listed_and_others_get_a_404_that_names_them(tiny: Tiny) -> None:
    async def work(talk: Talk) -> Any:
        point = talk.gateway.endpoint(talk.session)
        key = {"Authorization": f"Bearer {point.key}"}
        async with talk.http.get(f"{point.base_url}/models", headers=key) as answer:
            listed = (await answer.json())["data"]
        chat = await talk.chat([user("a")], model="Left")
        body = {"model": "base", "token_ids": [1], "sampling_params": {}}
        refused = await talk.post(GENERATE, body)
        unnamed = await talk.post(GENERATE, {"token_ids": [1], "sampling_params": {}})
        engine: Any = talk.gateway.service.sampler
        engine.unload("left")
        gone = await talk.post(GENERATE, body | {"model": "left"})
        return listed, chat, refused, unnamed[0], gone, [call.adapter for call in talk.session.calls]

    (listed, chat, refused, unnamed, gone, calls), _ = asked(tiny, work)
    assert [(one["id"], one["object"], one["parent"]) for one in listed] == [
        ("policy", "model", None), ("left", "model", "policy"), ("right", "model", "policy")
    ]  # fmt: skip
    error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert (chat[0], refused[0], gone[0], unnamed) == (404, 404, 404, 200)
    assert chat[2] == {"error": {"message": "there is no model 'Left': choose 'policy', 'left', 'right'", **error}}
    assert refused[2] == {"error": {"message": "there is no model 'base': choose 'policy', 'left', 'right'", **error}}
    assert gone[2] == {"error": {"message": "there is no model 'left': choose 'policy', 'right'", **error}}
    assert calls == [""]


def test_a_session_with_adapters_of_its_own_keeps_them_where_a_request_names_the_policy(tiny: Tiny) -> None:
    """So an evaluation of loaded adapters is played by any agent; what it samples are the session's own tokens."""

    async def work(talk: Talk) -> Any:
        body = {"model": "policy", "token_ids": list(PROMPT), "sampling_params": {"top_k": 0}}
        assert (await talk.post(GENERATE, body))[0] == 200
        return talk.session.calls, talk.session.branches()

    for trained in (True, False):
        own = replace(PLAIN, adapter="right")
        ((call,), (branch,)), sets = asked(tiny, work, own, trained=trained)
        done = call.completion
        assert np.abs(gaps(tiny, summed(tiny, sets[2]), [np.asarray(PROMPT, np.int32)], [[done]])).max() < 1e-5
        assert branch.mask.all() and branch.tokens.tolist() == done.tokens.tolist()


def test_a_sampler_that_loads_no_adapters_has_the_policy_alone() -> None:
    async def main() -> Any:
        async with talking(Scripted(lambda *_: [5]), settings=PLAIN) as talk:
            return await talk.post(GENERATE, {"model": "left", "token_ids": [1], "sampling_params": {}})

    status, _, answer = asyncio.run(main())
    assert status == 404 and answer["error"]["message"] == "there is no model 'left': choose 'policy'"
