"""The gateway: who may ask, what fails and how, retries, clients that go away, streams."""

import asyncio
import json
import re

import numpy as np
import pytest
from agents.gateways import SETTINGS, rendering, speaks, talking, user
from agents.scripted import Scripted, check_branches

from jaxrl_llm.agents.gateway import Gateway
from jaxrl_llm.agents.service import Overloaded, TokenService
from jaxrl_llm.agents.session import Ended

HI = [user("Hi")]


def test_a_request_needs_the_address_and_the_key_of_its_session():
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made) as talk:
            point = talk.gateway.endpoint(talk.session)
            assert point.base_url.startswith("http://127.0.0.1:") and len(point.key) > 30 and point.model == "policy"
            other = talk.gateway.service.open(seed=2)
            wrong = [
                (point.base_url, "Bearer no"), (point.base_url, ""), (point.base_url, f"Bearer {other.key}"),
                (point.base_url.replace(talk.session.id, "0" * 16), f"Bearer {point.key}"),
            ]  # fmt: skip
            for base, key in wrong:
                for answer in (
                    await talk.http.post(
                        f"{base}/chat/completions", json={"messages": HI}, headers={"Authorization": key}
                    ),
                    await talk.http.get(f"{base}/models", headers={"Authorization": key}),
                ):
                    assert answer.status == 401
                    assert (await answer.json())["error"]["code"] == "invalid_api_key"
            assert not talk.session.calls
            good = {"Authorization": f"Bearer {point.key}"}
            refused = await talk.http.post(f"{point.base_url}/chat/completions", data="{}", headers=good)
            assert refused.status == 415 and "application/json" in (await refused.json())["error"]["message"]
            refused = await talk.http.get(f"{point.base_url}/models", headers={**good, "Host": "evil.example"})
            assert refused.status == 403
            models = await (await talk.http.get(f"{point.base_url}/models", headers=good)).json()
            assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("policy", 1 << 20)]
            assert (await talk.http.get(point.base_url.split("/s/")[0] + "/health")).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_addresses_need_a_token(host, monkeypatch):
    with pytest.raises(ValueError, match=f"{re.escape(host)}.*token_variable"):
        Gateway(host=host).token()
    monkeypatch.setenv("TOKEN_OF_THE_TEST", "short")
    with pytest.raises(ValueError, match="at least 16"):
        Gateway(token_variable="TOKEN_OF_THE_TEST").token()
    monkeypatch.setenv("TOKEN_OF_THE_TEST", "a" * 20)

    async def main():
        config = Gateway(host=host, token_variable="TOKEN_OF_THE_TEST")
        async with talking(speaks(rendering(), ["Hello"]), rendering(), config=config) as talk:
            assert (await talk.say(HI))["content"] == "Hello"
            base = talk.gateway.endpoint(talk.session).base_url
            bare = {"Authorization": f"Bearer {talk.session.key}"}
            assert (await talk.http.get(f"{base}/models", headers=bare)).status == 401

    asyncio.run(main())


def test_an_ended_session_is_told_so_and_not_to_try_again():
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made, max_calls=1) as talk:
            await talk.say(HI)
            status, headers, body = await talk.chat(HI)
            assert (status, headers["x-should-retry"], body["error"]["code"]) == (403, "false", "max_calls")
            talk.session.close()
            status, headers, body = await talk.chat(HI)
            assert (status, headers["x-should-retry"], body["error"]["code"]) == (403, "false", "closed")

    asyncio.run(main())


def test_closing_a_session_ends_its_calls():
    made = rendering()

    async def main():
        sampler = Scripted(lambda *_: [1], delay_s=60)
        async with talking(sampler, made) as talk:
            asked = asyncio.create_task(talk.chat(HI))
            while not sampler.running:
                await asyncio.sleep(0.01)
            talk.session.close()
            status, _, body = await asked
            assert (status, body["error"]["code"]) == (403, "closed")
            assert sampler.given_up == 1 and not sampler.running and not talk.session.calls

    asyncio.run(main())


def test_too_many_calls_are_told_to_come_later():
    made = rendering()

    async def main():
        sampler = Scripted(lambda *_: [1], delay_s=60)
        async with talking(sampler, made) as talk:
            talk.gateway.service.most_waiting = 1
            asked = asyncio.create_task(talk.chat(HI))
            while not sampler.running:
                await asyncio.sleep(0.01)
            status, headers, body = await talk.chat([user("Other")])
            assert (status, headers["Retry-After"], body["error"]["type"]) == (429, "1", "rate_limit_error")
            talk.session.close()
            await asked

    asyncio.run(main())


def test_a_fault_of_the_sampler_is_not_the_clients():
    made = rendering()

    def script(*_):
        raise OSError("the servers are gone")

    async def main():
        async with talking(Scripted(script), made) as talk:
            status, _, body = await talk.chat(HI)
            assert status == 503 and body["error"]["message"] == "OSError: the servers are gone"
            assert not talk.session.calls and talk.session.counters["aborted"] == 1

    asyncio.run(main())


@pytest.mark.parametrize("headers", [{"x_stainless_retry_count": "1"}, {"Idempotency_Key": "k"}])
def test_a_retry_gets_the_first_answer(headers):
    made = rendering()

    async def main():
        sampler = speaks(made, ["One", "Two"])
        async with talking(sampler, made) as talk:
            body = {"messages": HI}
            first = await talk.post("/chat/completions", body, **headers)
            again = await talk.post("/chat/completions", body, **headers)
            assert first[2] == again[2] and first[2]["choices"][0]["message"]["content"] == "One"
            assert len(talk.session.calls) == len(sampler.asked) == 1 and talk.session.counters["retries"] == 1
            other = await talk.post("/chat/completions", {"messages": [user("Ho")]}, **headers)
            plain = await talk.post("/chat/completions", body)
            assert [a[2]["choices"][0]["message"]["content"] for a in (other, plain)] == ["Two", "Two"]
            assert len(talk.session.calls) == 3

    asyncio.run(main())


def test_a_retry_waits_for_the_first_answer_and_takes_it_over():
    made = rendering()

    async def main():
        sampler = speaks(made, ["One", "Two"])
        sampler.delay_s = 0.5
        async with talking(sampler, made) as talk:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await talk.chat(HI)
            assert sampler.running == 1
            status, _, body = await talk.post(
                "/chat/completions", {"model": "policy", "messages": HI}, x_stainless_retry_count="1"
            )
            assert (status, body["choices"][0]["message"]["content"]) == (200, "One")
            assert len(sampler.asked) == len(talk.session.calls) == 1

    asyncio.run(main())


def test_a_client_that_goes_away_ends_its_sampling_and_leaves_no_call():
    made = rendering()

    async def main():
        sampler = Scripted(lambda *_: [1], delay_s=60)
        async with talking(sampler, made, config=Gateway(grace_s=0.1)) as talk:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await talk.chat(HI, stream=True)
            began = asyncio.get_running_loop().time()
            while sampler.running:
                assert asyncio.get_running_loop().time() < began + 5
                await asyncio.sleep(0.01)
            assert sampler.given_up == 1 and not talk.session.calls

    asyncio.run(main())


def test_an_answer_that_nobody_read_is_not_learned_from():
    made = rendering()

    async def main():
        sampler = speaks(made, ["One", "Two"])
        sampler.delay_s = 0.4
        async with talking(sampler, made) as talk:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await talk.chat(HI)
            while not sampler.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert talk.session.branches() == ()
            body = {"model": "policy", "messages": HI}
            status, _, _ = await talk.post("/chat/completions", body, x_stainless_retry_count="1")
            assert status == 200 and len(talk.session.branches()) == len(sampler.asked) == 1

    asyncio.run(main())


def parts(text: str) -> list:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_streams_are_kept_open_by_comments_and_fail_by_an_event():
    made = rendering()

    async def main():
        sampler = speaks(made, ["One"])
        sampler.delay_s = 0.35
        async with talking(sampler, made, config=Gateway(silence_s=0.1)) as talk:
            status, headers, text = await talk.chat(HI, stream=True, stream_options={"include_usage": True})
            assert status == 200 and headers["Content-Type"] == "text/event-stream"
            assert 2 <= text.count(": waits\n\n") <= 4 and text.endswith("data: [DONE]\n\n")
            deltas = [c["delta"] for p in parts(text) for c in p["choices"]]
            assert deltas == [{"role": "assistant", "content": ""}, {"content": "One"}, {}]
            assert parts(text)[-1]["usage"]["completion_tokens"] == len(talk.session.calls[0].completion.tokens)
            sampler.script = lambda *_: 1 / 0
            _, _, text = await talk.chat(HI, stream=True)
            assert parts(text)[0]["error"]["type"] == "server_error"
            sampler.delay_s = 0
            status, _, body = await talk.chat(HI, stream=True)
            assert status == 503 and body["error"]["type"] == "server_error"

    asyncio.run(main())


def test_calls_wait_while_the_weights_change():
    async def main():
        sampler = Scripted(lambda *_: [1, 2], delay_s=0.1)
        service = TokenService(sampler, SETTINGS)
        one = service.open(seed=1)
        early = asyncio.create_task(service.continue_(one, np.asarray([3])))
        while not sampler.running:
            await asyncio.sleep(0.01)
        await service.hold()
        assert len(sampler.asked) == 1 and not sampler.running
        late = asyncio.create_task(service.continue_(one, np.asarray([4])))
        await asyncio.sleep(0.2)
        assert not late.done() and not sampler.running
        sampler.version = 8
        service.flow()
        assert (await late).versions.tolist() == [8, 8]
        assert (await early).versions.tolist() == [3, 3]
        counts = service.take()
        assert counts["agents/in_flight"] == 0 and counts["agents/held_calls"] == 1
        gone = asyncio.create_task(service.continue_(one, np.asarray([5])))
        await asyncio.sleep(0.02)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert sampler.given_up == 1 and len(one.calls) == 2
        check_branches(one.branches(), sampler)
        service.most_waiting = 0
        with pytest.raises(Overloaded):
            await service.continue_(one, np.asarray([5]))
        one.close()
        with pytest.raises(Ended):
            await TokenService(sampler, SETTINGS).continue_(one, np.asarray([5]))

    asyncio.run(main())


def test_a_client_that_is_slow_to_send_its_request_is_cut_off():
    async def main():
        async with talking(Scripted(lambda *_: [1]), None) as talk:
            talk.gateway._patience.limit_s = 0.2
            reader, writer = await asyncio.open_connection("127.0.0.1", talk.gateway.port)
            writer.write(b"POST /s/x/v1/chat")
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    asyncio.run(main())


def test_without_a_rendering_there_is_no_chat():
    async def main():
        async with talking(Scripted(lambda *_: [1]), None) as talk:
            status, _, body = await talk.chat(HI)
            assert status == 404 and body["error"]["type"] == "invalid_request_error"

    asyncio.run(main())
