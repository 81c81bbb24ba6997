"""A conversation goes on from exact ids: what was sampled stays as it was sampled, whatever the template would make of it."""

import random

import numpy as np
import pytest
from agents.chat_tokenizers import ADD, TEMPLATES, chat_tokenizer
from agents.test_rendering import mixed

from jaxrl_llm.agents.plain_text import PlainText
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.experience import Prompt, Task

ASKED = [{"role": "user", "content": "Hi"}]
NEXT = "<|im_start|>assistant\n"


def rendering(name: str, **settings) -> Rendering:
    return Rendering(chat_tokenizer(TEMPLATES[name]), **settings)


def ids(made, text: str) -> np.ndarray:
    return np.asarray(made.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text, "tool_call_id": "c", "name": "add"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("said", "tail"),
    [
        ([tool("132")], f"\n<|im_start|>user\n<tool_response>\n132\n</tool_response><|im_end|>\n{NEXT}"),
        ([tool("1"), tool("2")], f"\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n{NEXT}"),
        ([user("Go on.")], f"\n<|im_start|>user\nGo on.<|im_end|>\n{NEXT}"),
        ([tool("1"), user("So?")], f"\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n{NEXT}"),
        ([], f"\n{NEXT}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["<|im_end|>", "", "<|endoftext|>"])
def test_a_bridge_is_what_the_template_writes_between_turns(name, said, tail, end):
    made = rendering(name)
    prior = np.concatenate([made.prompt(ASKED, [ADD]), ids(made, f"Sum.{end}")])
    whole = made.bridge(prior, "stop" if end else "length", said, [ADD])
    missing = "" if end == "<|im_end|>" else "<|im_end|>"
    assert np.array_equal(whole, np.concatenate([prior, ids(made, missing + tail)]))
    assert whole.dtype == np.int32


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_without_thoughts_make_the_conversation_that_the_template_renders(name):
    made, messages = rendering(name), list(ASKED)
    whole = made.prompt(messages)
    for turn in range(4):
        whole = np.concatenate([whole, ids(made, f"Answer {turn}.<|im_end|>")])
        said = [user(f"Question {turn}?")]
        whole = made.bridge(whole, "stop", said)
        messages += [{"role": "assistant", "content": f"Answer {turn}."}, *said]
        text = made.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert np.array_equal(whole, ids(made, text))


@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_conversations_keep_every_sampled_id(name):
    """Completions of any ids, ended or cut off; texts of any mix: each prompt is the one before, its completion, and the new turn's text."""
    made, chance = rendering(name), random.Random(11)
    count, end = len(made.tokenizer), made.tokenizer.eos_token_id
    changed = 0
    for _ in range(200):
        prompt = made.prompt([{"role": "system", "content": mixed(chance)}, user(mixed(chance))], [ADD])
        for _ in range(chance.randint(1, 5)):
            sampled = [chance.randrange(count) for _ in range(chance.randint(1, 20))]
            finish = chance.choice(["stop", "length"])
            if finish == "stop":
                sampled.append(end)
            prior = np.concatenate([prompt, np.asarray(sampled, np.int32)])
            role, text = chance.choice(["user", "tool"]), mixed(chance)
            prompt = made.bridge(prior, finish, [{"role": role, "content": text}])
            assert np.array_equal(prompt[: len(prior)], prior)
            added = prompt[len(prior) :]
            shown = "\n<tool_response>\n{}\n</tool_response>" if role == "tool" else "\n{}"
            tail = f"{'' if finish == 'stop' else '<|im_end|>'}\n<|im_start|>user{shown}<|im_end|>\n{NEXT}"
            assert made.tokenizer.decode(added) == tail.format(text)
            harmless = ids(made, tail.format("x"))
            controls = {made.tokenizer.convert_tokens_to_ids(t) for t in made.tokenizer.get_added_vocab()}
            assert [i for i in added if i in controls] == [i for i in harmless if i in controls]
            changed += not np.array_equal(ids(made, made.tokenizer.decode(sampled)), sampled)
    assert changed > 200, "the sampled ids survive decoding and encoding, so the test cannot see who does that"


THINKING = "<think>\nHm.\n</think>\n\nYes.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "completion", "said", "rewrites"),
    [
        ("qwen3", THINKING, [user("So?")], True),
        ("qwen3", THINKING, [tool("1")], False),
        ("qwen3", THINKING, [tool("1"), user("So?")], True),
        ("qwen3", "Yes.<|im_end|>", [user("So?")], False),
        ("qwen2.5", THINKING, [user("So?")], False),
    ],
)
def test_a_template_that_drops_thoughts_starts_anew_where_history_is_its_own(name, completion, said, rewrites):
    kept, own = rendering(name), rendering(name, history="template")
    prior = np.concatenate([kept.prompt(ASKED), ids(kept, completion)])
    assert np.array_equal(kept.bridge(prior, "stop", said)[: len(prior)], prior)
    found = own.bridge(prior, "stop", said)
    assert found is None if rewrites else np.array_equal(found, kept.bridge(prior, "stop", said))
    if name == "qwen3":  # the template itself, asked whether the text so far is the beginning of what it writes
        thoughts = {"reasoning_content": "Hm."} if completion == THINKING else {}
        messages = [*ASKED, {"role": "assistant", "content": "Yes.", **thoughts}, *said]
        text = own.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith(own.tokenizer.decode(prior)) is not rewrites


def test_a_template_that_wants_a_call_before_a_result_is_given_one():
    strict = TEMPLATES["qwen2.5"] + (
        "{% for m in messages if m.role == 'tool' %}{% if not (messages | selectattr('tool_calls', 'defined') | list) %}"
        "{{ raise_exception('a result without a call') }}{% endif %}{% endfor %}"
    )
    made = Rendering(chat_tokenizer(strict))
    prior = np.concatenate([made.prompt(ASKED, [ADD]), ids(made, "Sum.")])
    tail = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n{NEXT}"
    assert np.array_equal(made.bridge(prior, "length", [tool("3")]), np.concatenate([prior, ids(made, tail)]))


SKIPS_RESULTS = TEMPLATES["qwen2.5"].replace(
    "{%- if m.role == 'tool' %}",
    "{%- if m.role == 'tool' and not loop.previtem.tool_calls %}{%- elif m.role == 'tool' %}",
)


def test_a_template_that_shows_results_after_calls_alone_is_given_one():
    made = Rendering(chat_tokenizer(SKIPS_RESULTS))
    prior = np.concatenate([made.prompt(ASKED, [ADD]), ids(made, "Sum.")])
    tail = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n{NEXT}"
    assert np.array_equal(made.bridge(prior, "length", [tool("3")]), np.concatenate([prior, ids(made, tail)]))
    # Of two results in a row it would show the first alone; nothing is lost unsaid.
    with pytest.raises(
        ValueError, match=r"does not go on after .*'tool', 'tool'.*leaves out what the role 'tool' says"
    ):
        made.bridge(prior, "length", [tool("3"), tool("4")])
    with pytest.raises(ValueError, match="leaves out what the role 'tool' says"):
        made.prompt([*ASKED, tool("3")])


def test_a_role_without_a_place_is_refused_in_a_bridge():
    made = Rendering(
        chat_tokenizer(
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role ~ m.content }}<|im_end|>{% endif %}{% endfor %}"
        )
    )
    with pytest.raises(ValueError, match="no place for messages of the role 'tool'"):
        made.bridge(made.prompt(ASKED), "stop", [tool("3")])


def test_a_template_without_end_tokens_goes_on_after_the_end_of_sequence():
    made = Rendering(ByteTokenizer().load())
    prior = np.concatenate([made.prompt(ASKED), ids(made, "Yes"), [made.tokenizer.eos_token_id]]).astype(np.int32)
    assert np.array_equal(
        made.bridge(prior, "stop", [user("So?")]), np.concatenate([prior, ids(made, "\nuser: So?\nassistant: ")])
    )


def test_plain_text_goes_on_by_the_words_alone():
    made = PlainText(ByteTokenizer(add_bos=True).load())
    assert made.stop_token_ids == (2,)
    prompt = Prompt(id="p", text="1+2=", tokens=np.asarray([1, *(3 + b for b in b"1+2=")], np.int32))
    task = Task(prompt=prompt, messages=[user("1+2=")])
    opened = made.opening(task, [user("<eos>")])
    assert opened.tolist() == [1, *(3 + b for b in b"1+2=<eos>")]
    assert made.bridge(opened, "stop", [tool("3"), user(";")]).tolist() == [*opened, 3 + ord("3"), 3 + ord(";")]
    action = made.parse(np.asarray([3 + ord("3"), 2], np.int32), finish="length")
    assert (action.text, action.calls, action.finish) == ("3", (), "length")
    with pytest.raises(ValueError, match="no place for the schemas of tools"):
        made.prompt([], [ADD])
