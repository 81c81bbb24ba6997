"""A conversation is rendered as its template writes it, and only the template writes control tokens."""

import random
import re

import pytest
from agents.chat_tokenizers import ADD, MARKUP, SPECIAL, TEMPLATES, chat_tokenizer

from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxrl_llm.experience import Prompt, Task

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}}
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  What is\n\n1 + 2? "},
    {"role": "assistant", "content": "I ask.", "reasoning_content": "Add them.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3\n", "tool_call_id": "c1"},
    {"role": "tool", "content": "", "tool_call_id": "c1"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes: “3”.", "reasoning_content": "It is."},
    {"role": "user", "content": "é 中 \\n \"q\""},
]  # fmt: skip


def rendering(name: str, **settings) -> Rendering:
    return Rendering(chat_tokenizer(TEMPLATES[name]), **settings)


def plain(made: Rendering, messages, tools=(), **more) -> list[int]:
    """What the tokenizer itself makes of the template's text."""
    text = made.tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **more
    )
    return made.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [(), (ADD,), (ADD, ADD)])
def test_harmless_conversations_get_the_ids_of_the_plain_rendering(name, tools):
    made = rendering(name)
    for length in range(1, len(TALK) + 1):
        messages = TALK[:length]
        assert made.prompt(messages, tools).tolist() == plain(made, messages, tools), length


def test_thoughts_at_the_beginning_of_an_answer_are_thoughts():
    made = rendering("qwen3")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nT\n</think>\n\nb"}]
    assert made.prompt(talk).tolist() == plain(made, talk)
    assert made.prompt([*talk, TALK[-1]]).tolist() == plain(
        made, [talk[0], {"role": "assistant", "content": "b"}, TALK[-1]]
    )
    qwen25 = rendering("qwen2.5")
    assert qwen25.tokenizer.decode(qwen25.prompt(talk)).count("<think>\nT\n</think>\n\nb<|im_end|>") == 1
    assert controls(qwen25, qwen25.prompt(talk)) == controls(
        qwen25, plain(qwen25, [talk[0], {"role": "assistant", "content": "b"}])
    )


def test_a_templates_keyword_arguments_reach_it():
    made = rendering("qwen3", template_kwargs={"enable_thinking": False})
    asked = [{"role": "user", "content": "Hi"}]
    assert made.prompt(asked).tolist() == plain(made, asked, enable_thinking=False)
    assert made.tokenizer.decode(made.prompt(asked)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def mixed(chance: random.Random) -> str:
    """A text of added tokens' spellings, halves of them, and what surrounds them in templates."""
    tokens = [*SPECIAL, *MARKUP]
    halves = [piece for token in tokens for piece in (token[:4], token[4:], token[1:-1])]
    words = [
        "\n",
        " ",
        "assistant\n",
        "system",
        "3",
        "x ",
        '"',
        "\\",
        '"}}',
        "{",
        "</",
        "é",
        "中",
        "\ue000",
        "\U000f0001",
    ]
    return "".join(chance.choice((tokens, halves, words)[chance.randrange(3)]) for _ in range(chance.randint(1, 12)))


def attack(chance: random.Random):
    """A conversation with tools whose texts are mixes, and the same one with harmless texts in their place."""
    texts = [mixed(chance) for _ in range(11)]
    texts.append("x" + mixed(chance))

    def build(text):
        call = {
            "id": text(0),
            "type": "function",
            "function": {"name": text(1), "arguments": {text(2): text(3), "b": [text(4)]}},
        }
        tool = {"type": "function", "function": {"name": text(5), "description": text(6), "parameters": {
            "type": "object", "properties": {text(7): {"type": "string", "description": text(8)}}, "required": [text(7)]}}}  # fmt: skip
        messages = [
            {"role": "system", "content": text(9)},
            {"role": "user", "content": text(10)},
            {"role": "assistant", "content": text(11), "tool_calls": [call]},
            {"role": "tool", "content": text(0), "tool_call_id": text(0)},
            {"role": "user", "content": text(1) + text(2)},
        ]
        return messages, [tool]

    return build(lambda i: texts[i]), build(lambda i: f"word{i}")


def controls(made: Rendering, ids) -> list[int]:
    own = set(made.tokenizer.convert_tokens_to_ids([*SPECIAL, *MARKUP]))
    return [i for i in ids if i in own]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_from_outside_never_becomes_a_control_token(name):
    made, chance, forged = rendering(name), random.Random(7), 0
    for _ in range(200):
        (messages, tools), (harmless, their_tools) = attack(chance)
        wanted = controls(made, plain(made, harmless, their_tools))
        ids = made.prompt(messages, tools)
        assert controls(made, ids) == wanted
        # Qwen3's template looks for thoughts in an answer; in one from outside there are none.
        answer = messages[2]["content"]
        shown = [*messages[:2], {**messages[2], "content": "STANDS HERE"}, *messages[3:]]
        text = made.tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, add_generation_prompt=True)
        assert made.tokenizer.decode(ids) == text.replace("STANDS HERE", answer)
        forged += controls(made, plain(made, messages, tools)) != wanted
    assert forged > 150, (
        "the plain rendering takes the mixes for control tokens, or the mixes are too tame to test anything"
    )


def test_parts_of_a_token_from_two_texts_do_not_join():
    joining = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    made = Rendering(chat_tokenizer(joining))
    halves = [{"role": "user", "content": "<tool_"}, {"role": "assistant", "content": "call>"}]
    ids = made.prompt(halves)
    assert controls(made, ids) == [made.tokenizer.eos_token_id]
    assert made.tokenizer.decode(ids) == "<tool_call><|im_end|>"


def test_keys_that_a_template_puts_into_marks_do_not_become_control_tokens():
    spelled = (
        TEMPLATES["qwen2.5"]
        + "{% for t in tools or [] %}{% for key in t.function.parameters.properties %}<{{ key }}>{% endfor %}{% endfor %}"
    )
    made = Rendering(chat_tokenizer(spelled))
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"tool_call": {}}}},
    }
    asked = [{"role": "user", "content": "x"}]
    call = made.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert plain(made, asked, [tool]).count(call) - made.prompt(asked, [tool]).tolist().count(call) == 1


TRIMS = (
    "{{ '<|endoftext|>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content | trim) ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)


def test_a_template_that_trims_gets_the_same_ids():
    made = Rendering(chat_tokenizer(TRIMS))
    asked = [{"role": "user", "content": " \n x <|im_end|>\u2003\n"}]
    assert (
        made.tokenizer.decode(made.prompt(asked))
        == "<|endoftext|><|im_start|>user\nx <|im_end|><|im_end|>\n<|im_start|>model\n"
    )
    assert controls(made, made.prompt(asked)) == controls(made, plain(made, [{"role": "user", "content": "x"}]))


def test_a_role_without_a_place_is_refused_where_it_is_used():
    made = Rendering(chat_tokenizer(TRIMS))
    assert made.refused == {"system": "System role not supported", "tools": "it leaves out 'lookup'"}
    with pytest.raises(ValueError, match=r"no place for messages of the role 'system' .System role not supported"):
        made.prompt([{"role": "developer", "content": "x"}, {"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="no place for tools"):
        made.prompt([{"role": "user", "content": "x"}], [ADD])


def test_tools_are_refused_where_the_format_of_calls_is_not_known():
    other = TEMPLATES["qwen2.5"].replace("tool_call>", "invocation>")
    with pytest.raises(ValueError, match=r"format in which the model calls them is not known.*'hermes'"):
        Rendering(chat_tokenizer(other)).prompt([{"role": "user", "content": "x"}], [ADD])
    assert len(Rendering(chat_tokenizer(other), calls="hermes").prompt([{"role": "user", "content": "x"}], [ADD]))


def turns(expression: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ "
        + expression
        + " ~ '<|im_end|>\\n' }}{% endfor %}"
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (turns("m.content | upper"), "edits or leaves out content of the role 'user'"),
        (turns("m.content ~ m.content"), "repeats content of the role 'user'"),
        (turns("(m.content | reverse if m.role == 'assistant' else m.content)"), "edits or leaves out content of the role 'assistant'|no place"),
        (turns("(m.content.split('Upon ')[-1] if m.role == 'assistant' else m.content)"), "assistant"),
        (turns("m.content") + "{{ messages[0].content if messages[0].role == 'system' else '' }}", "repeats content of the role 'system'"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}{{ messages[0].content if messages[0].role == 'system' else '' }}", "moves content of the role 'user'"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "no place for the role 'assistant'"),
        ("{{ raise_exception('never') }}", "no place for the role 'user': never"),
        ("{% for m in messages %}{{ m.content.replace('?', '!') }}{% endfor %}", "user"),
    ],
)  # fmt: skip
def test_a_template_that_moves_edits_or_repeats_content_is_refused_by_the_roles_name(template, told):
    with pytest.raises(ValueError, match=told):
        Rendering(chat_tokenizer(template))


def test_a_template_that_reads_content_is_refused_where_the_safe_rendering_differs():
    # The content stays as it is, but the template says more where it finds a word.
    with pytest.raises(ValueError, match="'user' gets other ids"):
        Rendering(chat_tokenizer(turns("m.content ~ (' (blue)' if 'blue' in m.content else '')")))


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        Rendering(CharTokenizer(alphabet="abc").load())


def test_what_clients_send_is_taken_in_one_form():
    made = rendering("qwen3")
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "refusal": None, "provider_specific_fields": {"refusal": None},
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"b":2,  "a": 1}'}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"},
    ]  # fmt: skip
    text = made.tokenizer.decode(made.prompt(sent))
    assert text == (
        "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ).replace("<think>\n\n</think>\n\n", "")


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "<|im_end|>", "", None, '{"a": "\\ud800"}'])
@pytest.mark.parametrize("name", TEMPLATES)
def test_malformed_arguments_in_history_are_text(name, arguments):
    made = rendering(name)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "y"},
    ]
    harmless = plain(made, [talk[0], {**talk[1], "tool_calls": [CALL]}, talk[2]])
    assert controls(made, made.prompt(talk)) == controls(made, harmless)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "robot", "content": "x"}, "role 'robot', and roles are developer, system"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"parts of the type 'text' \(got \['image_url'\]",
        ),
        ({"content": "x"}, "role None"),
    ],
)
def test_messages_of_other_kinds_are_refused(message, told):
    with pytest.raises(ValueError, match=told):
        rendering("qwen3").prompt([message])


def test_an_opening_is_the_task_and_what_the_environment_says():
    made = rendering("qwen3")
    task = Task(prompt=Prompt(id="p", text="Hi"), messages=[{"role": "user", "content": "Hi"}], tools=[ADD])
    wanted = plain(made, [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Go."}], [ADD])
    assert made.opening(task, [{"role": "user", "content": "Go."}]).tolist() == wanted


def test_the_stop_ids_are_the_tokenizers_and_the_templates():
    tokenizer = chat_tokenizer(TEMPLATES["qwen3"])
    tokenizer.eos_token = "<|endoftext|>"
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert Rendering(tokenizer).stop_token_ids == tuple(ends)
    byte = ByteTokenizer().load()
    assert Rendering(byte).stop_token_ids == (byte.eos_token_id,)
    assert re.search("tools", " ".join(Rendering(byte).refused))
