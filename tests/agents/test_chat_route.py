"""Chat completions: messages become exact token sequences, what agents send back is found again, and fields are honoured or named."""

import asyncio
import json
import random

import numpy as np
import pytest
from agents.chat_tokenizers import ADD
from agents.gateways import rendering, speaks, talking, user
from agents.scripted import Scripted, check_branches
from builders import slow_but

from jaxrl_llm.experience import SamplingParams

CALL = '<think>\nI add.\n</think>\n\nI ask.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_a_conversation_with_a_tool_is_one_branch_of_the_very_tokens():
    made = rendering()
    tokenizer = made.tokenizer

    async def main():
        sampler = speaks(made, [CALL, "<think>\nDone.\n</think>\n\nIt is 3."])
        async with talking(sampler, made) as talk:
            messages = [{"role": "system", "content": "Be brief."}, user("1 + 2?")]
            status, _, body = await talk.chat(messages, tools=[ADD], logprobs=True, return_token_ids=True)
            assert status == 200
            (choice,) = body["choices"]
            first = choice["message"]
            assert choice["finish_reason"] == "tool_calls"
            assert first["content"].strip() == "I ask." and first["reasoning_content"].strip() == "I add."
            assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
            prefix, done = sampler.asked[0]
            assert body["prompt_token_ids"] == prefix.tolist() and choice["token_ids"] == done.tokens.tolist()
            assert body["usage"] == {
                "prompt_tokens": len(prefix), "completion_tokens": len(done.tokens), "total_tokens": len(prefix) + len(done.tokens),
            }  # fmt: skip
            entries = choice["logprobs"]["content"]
            assert [e["logprob"] for e in entries] == done.logprobs.astype(float).tolist()
            assert "".join(e["token"] for e in entries) == CALL + "<|im_end|>"
            echo = {**first, "provider_specific_fields": {"refusal": None}}
            call = {**first["tool_calls"][0], "function": {"name": "add", "arguments": '{"b":2,  "a":1}'}}
            messages += [{**echo, "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
            second = await talk.say(messages, tools=[ADD])
            assert second["content"] == "It is 3." and second.get("tool_calls") is None
            (branch,) = talk.session.branches()
            check_branches([branch], sampler)
            whole = tokenizer.decode([*branch.prefix, *branch.tokens])
            assert whole.startswith("<|im_start|>system\n") and whole.endswith(
                f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
                "<think>\nDone.\n</think>\n\nIt is 3.<|im_end|>"
            )
            assert not talk.session.ignored

    asyncio.run(main())


ECHOES = {
    "as it came": lambda m: m,
    "without thoughts": lambda m: {"role": "assistant", "content": m["content"], "tool_calls": m["tool_calls"]},
    "stripped": lambda m: {**m, "content": m["content"].strip()},
    "parts": lambda m: {**m, "content": [{"type": "text", "text": m["content"]}]},
    "other id": lambda m: {**m, "tool_calls": [{**m["tool_calls"][0], "id": "mine"}]},
}


@pytest.mark.parametrize("echo", ECHOES)
def test_what_agents_send_back_is_found_again(echo):
    made = rendering()

    async def main():
        sampler = speaks(made, [CALL])
        async with talking(sampler, made) as talk:
            messages = [user("1 + 2?")]
            for _ in range(3):
                said = await talk.say(messages, tools=[ADD])
                messages += [ECHOES[echo](said), {"role": "tool", "tool_call_id": "x", "content": "3"}]
            assert len(talk.session.branches()) == 1 and not talk.session.counters
            check_branches(talk.session.branches(), sampler)

    asyncio.run(main())


def forked(change, texts=(CALL,), *, history="keep", tools=(ADD,), **more):
    """The session after two answers, a `change` of the messages, and a third one."""
    made = rendering(history=history)

    async def main():
        sampler = speaks(made, texts)
        async with talking(sampler, made, **more) as talk:
            messages = [{"role": "system", "content": "Be brief."}, user("1 + 2?")]
            for _ in range(2):
                messages += [await talk.say(messages, tools=list(tools)), user("Go on.")]
            await talk.say(change(messages), tools=list(tools))
            check_branches(talk.session.branches(), sampler)
            return talk.session, sampler

    return asyncio.run(main())


def test_a_changed_system_prompt_is_another_conversation():
    session, _ = forked(lambda m: [{"role": "system", "content": "Be long."}, *m[1:]])
    assert [len(b.turns) for b in session.branches()] == [2, 1] and session.counters == {"fork/prompt": 1}


def test_an_edited_answer_forks_after_the_last_answer_that_is_the_policys():
    session, sampler = forked(lambda m: [*m[:4], {"role": "assistant", "content": "Mine."}, user("And?")])
    first, second = session.branches()
    assert [t.call for t in first.turns] == [0, 1] and [t.call for t in second.turns] == [0, 2]
    assert second.mask.sum() == len(sampler.asked[2][1].tokens) and session.counters == {"fork/answer": 1}
    text = rendering().tokenizer.decode(second.tokens)
    assert "Go on.<|im_end|>\n<|im_start|>assistant\n" in text and "Mine.<|im_end|>\n<|im_start|>user\nAnd?" in text


def test_an_edited_first_answer_is_rendered_as_text_from_outside():
    edited = {"role": "assistant", "content": "<|im_end|>\n<tool_call>"}
    session, sampler = forked(lambda m: [*m[:2], edited, user("And?")])
    assert [[t.call for t in b.turns] for b in session.branches()] == [[0, 1], [2]]
    tokenizer = rendering().tokenizer
    prefix = sampler.asked[2][0].tolist()
    assert "<|im_end|>\n<tool_call>" in tokenizer.decode(prefix)
    assert tokenizer.convert_tokens_to_ids("<tool_call>") not in prefix[prefix.index(tokenizer.eos_token_id, 30) :]


def test_a_history_of_the_template_is_rendered_anew_where_thoughts_go():
    session, _ = forked(lambda m: m, history="template")
    assert len(session.branches()) == 3 and session.counters == {"fork/thoughts": 2}
    session, _ = forked(lambda m: m, history="keep")
    assert len(session.branches()) == 1


def test_an_answer_may_be_asked_for_again_or_go_on():
    session, sampler = forked(lambda m: m[:4], ["One", "Two", "Three"])
    assert [[t.call for t in b.turns] for b in session.branches()] == [[0, 1], [0, 2]]
    assert session.counters == {"fork/repeated": 1}
    session, sampler = forked(lambda m: m[:5], ["One", "Two", "Three"])
    assert len(session.branches()) == 1 and sampler.asked[2][0].tolist() == [
        *sampler.asked[1][0], *sampler.asked[1][1].tokens
    ]  # fmt: skip


def test_a_stop_string_ends_the_text_and_is_found_again_with_and_without_it():
    made = rendering()

    async def main():
        for echo in ("code", "code</code>", "code</code>\n"):
            sampler = speaks(made, ["code</code> and more"])
            async with talking(sampler, made) as talk:
                first = await talk.say([user("Write.")], stop=["Observation:", "</code>"])
                assert first["content"] == "code"
                assert made.tokenizer.decode(sampler.asked[0][1].tokens) == "code</code>"
                again = [user("Write."), {"role": "assistant", "content": echo}, user("More.")]
                await talk.say(again, stop="</code>")
                (branch,) = talk.session.branches()
                text = made.tokenizer.decode(branch.tokens)
                assert (
                    text
                    == "code</code><|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\ncode</code>"
                )
                assert branch.mask.sum() == 2 * len(sampler.asked[0][1].tokens)

    asyncio.run(main())


def test_a_completion_that_was_cut_off_goes_on_after_an_end_token_that_is_not_learned():
    made = rendering()

    async def main():
        sampler = speaks(made, ["A long story without an end", "Fine."])
        async with talking(sampler, made) as talk:
            _, _, body = await talk.chat([user("Tell.")], max_tokens=3)
            assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 3
            await talk.say([user("Tell."), body["choices"][0]["message"], user("Shorter.")])
            (branch,) = talk.session.branches()
            end = made.stop_token_ids[0]
            assert branch.tokens[3] == end and branch.mask.tolist()[:4] == [True, True, True, False]

    asyncio.run(main())


BAD = [
    ({"n": 2}, "n"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0]"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0]"),
    ({"audio": {}}, "audio"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"stop": [""]}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"temperature": "hot"}, "temperature"),
    ({"model": "gpt"}, "model"),
]


@pytest.mark.parametrize(("change", "field"), BAD)
def test_a_wrong_request_is_told_its_field(change, field):
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made) as talk:
            status, _, body = await talk.post("/chat/completions", {"messages": [user("Hi")], **change})
            assert status == (404 if field == "model" else 400) and body["error"]["param"] == field, body
            assert not talk.session.calls

    asyncio.run(main())


def test_a_prompt_without_room_is_told_so():
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made, max_length=40) as talk:
            status, _, body = await talk.chat([user("word " * 50)])
            assert status == 400 and body["error"]["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_sampling_is_the_runs_where_it_is_learned_from_and_what_is_ignored_is_recorded():
    made = rendering()
    own = SamplingParams(max_tokens=9, temperature=0.7)
    asked = {
        "temperature": 0.2, "top_p": 0.9, "top_k": -1, "presence_penalty": 1.5, "frequency_penalty": 0, "tool_choice": "required",
        "parallel_tool_calls": False, "response_format": {"type": "json_object"}, "reasoning_effort": "low", "user": "me", "metadata": {},
        "logit_bias": {"1": 5}, "max_tokens": 50, "stop": "x", "seed": 3,
    }  # fmt: skip

    async def main(trained):
        sampler = speaks(made, ["Hello"])
        async with talking(sampler, made, settings=own, trained=trained) as talk:
            await talk.say([user("Hi")], tools=[ADD], **asked)
            return talk.session.ignored, sampler.settings[0]

    ignored, used = asyncio.run(main(True))
    common = {
        "presence_penalty",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "reasoning_effort",
        "user",
        "logit_bias",
    }
    assert set(ignored) == common | {"temperature", "top_p"}
    assert (used.temperature, used.top_p, used.max_tokens, used.stop_strings) == (0.7, 1.0, 9, ("x",))
    assert used.stop_token_ids == tuple(made.stop_token_ids)
    ignored, used = asyncio.run(main(False))
    assert set(ignored) == common
    assert (used.temperature, used.top_p, used.top_k) == (0.2, 0.9, 0)


def test_no_tools_are_rendered_where_none_may_be_called():
    made = rendering()

    async def main():
        sampler = speaks(made, ["Hello"])
        async with talking(sampler, made) as talk:
            await talk.say([user("Hi")], tools=[ADD], tool_choice="none")
            assert sampler.asked[0][0].tolist() == made.prompt([user("Hi")]).tolist()
            assert not talk.session.ignored

    asyncio.run(main())


def wild(chance: random.Random) -> list[int]:
    """Random ids, some of them markup, some of them calls that cannot be read."""
    tokenizer = rendering().tokenizer
    texts = [
        "Hello there", "<think>\nhm\n</think>\n\n", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>', "<tool_call>", "</think>", "  \n",
        '<tool_call>\n{"name": "other", "arguments": 3}\n</tool_call>', "é 中",
    ]  # fmt: skip
    text = "".join(chance.choice(texts) for _ in range(chance.randint(0, 4)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [chance.randrange(len(tokenizer)) for _ in range(chance.randint(0, 3))]
    return ids + [tokenizer.eos_token_id] * (chance.random() < 0.8)


async def talk_at_random(talk, chance: random.Random) -> None:
    """A client that goes on, edits, cuts off, repeats, asks side by side, changes the system prompt, and garbles arguments."""
    messages = [{"role": "system", "content": "Be brief."}, user("1 + 2?")]
    for _ in range(chance.randint(2, 6)):
        more = {"tools": [ADD]} if chance.random() < 0.9 else {}
        more |= {"max_tokens": chance.randint(1, 4)} if chance.random() < 0.3 else {}
        if chance.random() < 0.2:
            both = [messages, [*messages, user("beside")]]
            answers = await asyncio.gather(*(talk.chat(m, **more) for m in both))
            assert {status for status, _, _ in answers} == {200}
            continue
        status, _, body = await talk.chat(messages, **more)
        assert status == 200, body
        said = body["choices"][0]["message"]
        calls = said.get("tool_calls") or []
        if calls and chance.random() < 0.3:
            calls[0]["function"]["arguments"] = chance.choice(['{"a": ', "[]", "", '{"a":1}'])
        answers = [
            {"role": "tool", "tool_call_id": c["id"], "content": chance.choice(("3", "<|im_end|>"))} for c in calls
        ]
        messages = [*messages, said, *(answers or [user(chance.choice(("Go on.", "Why?")))])]
        kind = chance.randrange(8)
        if kind == 0:
            messages = [{"role": "system", "content": chance.choice(("Be long.", "Be brief."))}, *messages[1:]]
        elif kind == 1:
            place = chance.randrange(1, len(messages))
            messages = [*messages[:place], {**messages[place], "content": "edited"}, *messages[place + 1 :]]
        elif kind == 2:
            messages = messages[: max(2, len(messages) - chance.randint(1, 3))]


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("seed", slow_but((0,), range(4)))
def test_random_conversations_are_exact_and_never_fail(seed, history):
    """25 conversations for each seed and history, 200 in all."""
    made = rendering(history=history)

    async def main():
        turns = branches = 0
        for number in range(25):
            chance = random.Random(1000 * seed + number)
            sampler = Scripted(lambda prefix, seed, settings: wild(random.Random(seed)))
            async with talking(sampler, made, seed=number) as talk:
                await talk_at_random(talk, chance)
                found = talk.session.branches()
                check_branches(found, sampler)
                turns, branches = turns + len(sampler.asked), branches + len(found)
        return turns, branches

    turns, branches = asyncio.run(main())
    assert turns > 80 and 25 < branches < turns


def test_a_repeated_run_draws_the_same_whatever_the_delays():
    made = rendering()

    async def run(delays):
        delay = random.Random(delays)
        sampler = Scripted(lambda prefix, seed, settings: wild(random.Random(seed)))
        async with talking(sampler, made, seed=3) as talk:

            async def side(number):
                messages = [user(f"Part {number}")]
                for _ in range(3):
                    await asyncio.sleep(delay.random() / 50)
                    messages += [await talk.say(messages), user("Go on.")]

            await asyncio.gather(*(side(number) for number in range(4)))
            return sorted(np.concatenate([b.prefix, b.tokens]).tolist() for b in talk.session.branches())

    first, second = asyncio.run(run(1)), asyncio.run(run(2))
    assert first == second and len(first) == 4


def test_bodies_that_are_no_json_objects_are_refused():
    made = rendering()

    async def main():
        async with talking(speaks(made, ["Hello"]), made) as talk:
            point = talk.gateway.endpoint(talk.session)
            headers = {"Authorization": f"Bearer {point.key}", "Content-Type": "application/json"}
            for text in ("{", "[]", "3", json.dumps({"messages": None}), "[" * 5000):
                answer = await talk.http.post(f"{point.base_url}/chat/completions", data=text, headers=headers)
                assert answer.status == 400 and "error" in await answer.json()

    asyncio.run(main())
