"""The openai SDK against the chat gateway: plain and streamed, with tools, retries, errors."""

import asyncio

import pytest
from agents.chat_tokenizers import ADD
from agents.gateways import rendering, speaks, talking, user

openai = pytest.importorskip("openai", reason="openai is not installed: see tests/third_party/requirements.txt")

STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}  # the SDK streams no other tools
CALL = '<think>\nI add.\n</think>\n\nI ask.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def client(talk, **more):
    point = talk.gateway.endpoint(talk.session)
    return openai.AsyncOpenAI(base_url=point.base_url, api_key=point.key, **more)


def test_plain_and_streamed_answers_are_the_same_message():
    made = rendering()

    async def main():
        async with talking(speaks(made, [CALL]), made) as talk, client(talk) as sdk:
            asked = {"model": "policy", "messages": [user("1 + 2?")], "tools": [STRICT]}
            plain = await sdk.chat.completions.create(**asked)
            async with sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                final = await stream.get_final_completion()
            one, two = plain.choices[0], final.choices[0]
            assert one.finish_reason == two.finish_reason == "tool_calls"
            assert one.message.content == two.message.content and one.message.content.strip() == "I ask."
            said = [(c.function.name, c.function.arguments) for m in (one, two) for c in m.message.tool_calls]
            assert said == [("add", '{"a": 1, "b": 2}')] * 2
            assert one.message.reasoning_content.strip() == "I add."
            assert chunks[-1].usage == plain.usage and chunks[-1].usage.completion_tokens > 10
            models = await sdk.models.list()
            assert [m.id for m in models.data] == ["policy"]
            assert len(talk.session.calls) == 2

    asyncio.run(main())


def test_log_probs_are_those_of_the_sampled_tokens():
    made = rendering()

    async def main():
        sampler = speaks(made, ["Hello"])
        async with talking(sampler, made) as talk, client(talk) as sdk:
            asked = {"model": "policy", "messages": [user("Hi")], "logprobs": True}
            said = (await sdk.chat.completions.create(**asked)).choices[0]
            expected = sampler.asked[0][1].logprobs.astype(float).tolist()
            assert [e.logprob for e in said.logprobs.content] == expected
            async with sdk.chat.completions.stream(**asked) as stream:
                final = await stream.get_final_completion()
            assert [e.logprob for e in final.choices[0].logprobs.content] == expected

    asyncio.run(main())


def test_what_is_not_served_is_a_bad_request_that_is_not_tried_again():
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made, max_calls=1) as talk, client(talk) as sdk:
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.chat.completions.create(model="policy", messages=[user("Hi")], n=2)
            assert refused.value.param == "n"
            await sdk.chat.completions.create(model="policy", messages=[user("Hi")])
            with pytest.raises(openai.PermissionDeniedError) as ended:
                await sdk.chat.completions.create(model="policy", messages=[user("Hi")])
            assert ended.value.code == "max_calls"
            point = talk.gateway.endpoint(talk.session)
            async with openai.AsyncOpenAI(base_url=point.base_url, api_key="wrong") as other:
                with pytest.raises(openai.AuthenticationError):
                    await other.models.list()
            assert len(talk.session.calls) == 1

    asyncio.run(main())


def test_a_retry_of_the_sdk_draws_nothing_new():
    made = rendering()

    async def main():
        sampler = speaks(made, ["One", "Two"])
        sampler.delay_s = 1.0
        async with talking(sampler, made) as talk, client(talk, timeout=0.6, max_retries=3) as sdk:
            said = await sdk.chat.completions.create(model="policy", messages=[user("Hi")])
            assert said.choices[0].message.content == "One"
            assert len(sampler.asked) == len(talk.session.calls) == 1 and talk.session.counters["retries"] >= 1

    asyncio.run(main())
