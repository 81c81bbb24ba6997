"""Completions are read: thoughts first, then calls with their status, then the rest."""

import numpy as np
import pytest
from agents.chat_tokenizers import ADD, TEMPLATES, chat_tokenizer

from jaxrl_llm.agents.calls import FORMATS, format_of, split
from jaxrl_llm.agents.rendering import Rendering

HERMES, ELEMENTS, LLAMA = (format_of("", name) for name in ("hermes", "elements", "llama3"))
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def statuses(text, form=HERMES, tools=None):
    return [(call.name, call.arguments, call.status) for call in split(text, form, tools).calls]


def test_a_call_is_read_and_leaves_the_text():
    found = split(f"I add.\n{GOOD}\n{GOOD}", HERMES, [ADD])
    assert found.text == "I add."
    assert [(c.id, c.name, c.arguments, c.status) for c in found.calls] == [
        ("call_0", "add", {"a": 1, "b": 2}, "ok"), ("call_1", "add", {"a": 1, "b": 2}, "ok"),
    ]  # fmt: skip
    assert found.calls[0].raw == GOOD


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "add", "arguments": {}}', "ok"),
        ('{"name": "add"}', "ok"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "ok"),
        ('{"name": "sub", "arguments": {}}', "unknown_tool"),
        ('{"name": "add", "arguments": {"a": 1}', "bad_json"),
        ('{"name": "add", "arguments": [1]}', "bad_json"),
        ('{"name": "add", "arguments": "x"}', "bad_json"),
        ('{"name": "", "arguments": {}}', "bad_json"),
        ('{"name": 3, "arguments": {}}', "bad_json"),
        ('["add"]', "bad_json"),
        ("", "bad_json"),
        ('{"name": "add", "arguments": {"a": NaN}}', "bad_json"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("9" * 5000), "bad_json"),
        ("[" * 100_000, "bad_json"),
    ],
)  # fmt: skip
def test_statuses_of_calls(body, status):
    text = f"Text <tool_call>{body}</tool_call> after"
    found = split(text, HERMES, [ADD])
    assert [call.status for call in found.calls] == [status]
    assert found.text == ("Text  after" if status == "ok" else text)


def test_a_call_that_is_cut_off_is_unclosed_and_stays():
    found = split(f'{GOOD}\n<tool_call>\n{{"name": "add"', HERMES)
    assert [call.status for call in found.calls] == ["ok", "unclosed"]
    assert found.text == '<tool_call>\n{"name": "add"'
    assert found.calls[1].raw == found.text
    whole = split('<tool_call>\n{"name": "add", "arguments": {"a": 1}}', HERMES)
    assert (whole.calls[0].status, whole.calls[0].arguments) == ("unclosed", {"a": 1})


def test_marks_within_arguments_belong_to_the_arguments():
    nested = '<tool_call>{"name": "w", "arguments": {"t": "<tool_call> </tool_call> x"}}</tool_call>'
    assert statuses(nested) == [("w", {"t": "<tool_call> </tool_call> x"}, "ok")]
    assert statuses(f"<tool_call>oh {GOOD}") == [("", None, "unclosed"), ("add", {"a": 1, "b": 2}, "ok")]
    assert statuses(f"<tool_call>oh</tool_call>{GOOD}") == [("", None, "bad_json"), ("add", {"a": 1, "b": 2}, "ok")]


def test_calls_within_thoughts_are_thoughts():
    found = split(f"<think>\nMaybe {GOOD}\n</think>\n\nNo.", HERMES)
    assert (found.reasoning, found.text, found.calls) == (f"Maybe {GOOD}", "No.", ())
    cut = split(f"<think>\nMaybe {GOOD}", HERMES)
    assert (cut.reasoning, cut.text, cut.calls) == (f"Maybe {GOOD}", "", ())
    begun = split(f"Maybe {GOOD}</think>{GOOD}", HERMES, thinking=True)
    assert (begun.reasoning, begun.text, len(begun.calls)) == (f"Maybe {GOOD}", "", 1)


def test_text_without_thoughts_and_calls_stays_as_it_is():
    assert split("\n a </think> b\n", HERMES).text == "\n a </think> b\n"
    assert split(GOOD, None).text == GOOD


def test_elements_are_read_by_the_schema():
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1.5\n</parameter>\n<parameter=note>\n12\nlines\n</parameter>\n</function>\n</tool_call>"
    assert statuses(text, ELEMENTS, [ADD]) == [("add", {"a": 1.5, "note": "12\nlines"}, "ok")]
    assert statuses(text, ELEMENTS) == [("add", {"a": "1.5", "note": "12\nlines"}, "ok")]
    odd = text.replace("1.5", "one")
    assert statuses(odd, ELEMENTS, [ADD])[0][1]["a"] == "one"
    assert statuses("<tool_call><function=add>stray</function></tool_call>", ELEMENTS)[0][2] == "bad_json"
    assert statuses(GOOD, ELEMENTS)[0][2] == "bad_json"


def test_a_whole_completion_is_a_call_of_llama():
    assert statuses('{"name": "add", "parameters": {"a": 1}}', LLAMA) == [("add", {"a": 1}, "ok")]
    assert statuses('<|python_tag|>{"name": "add", "parameters": {}}', LLAMA) == [("add", {}, "ok")]
    assert statuses("The sum is 3.", LLAMA) == [] and statuses('{"name": ', LLAMA)[0][2] == "bad_json"
    assert split("The sum is 3.", LLAMA).text == "The sum is 3."


def test_the_format_is_found_by_the_template():
    assert [format_of(TEMPLATES[name]).name for name in TEMPLATES] == ["hermes", "hermes"]
    assert format_of("... <tool_call>\n<function=example>").name == "elements"
    assert format_of('<|eot_id|> ... {"name": "parameters"}').name == "llama3"
    assert format_of("<|im_start|>") is None
    with pytest.raises(ValueError, match="'xml': choose one of"):
        format_of("", "xml")
    assert len({form.name for form in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_read_with_the_marks_and_without_the_end(name):
    made = Rendering(chat_tokenizer(TEMPLATES[name]))
    text = f"<think>\nT\n</think>\n\nI add.\n{GOOD}<|im_end|>"
    ids = np.asarray(made.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    found = made.parse(ids, tools=[ADD])
    assert (found.text, found.reasoning, found.calls[0].arguments, found.finish) == (
        "I add.",
        "T",
        {"a": 1, "b": 2},
        "stop",
    )
    assert made.parse(ids[:-1], finish="length") == found.__class__(**{**vars(found), "finish": "length"})
    assert made.parse(ids[:0], finish="length").text == ""
    assert made.parse(ids[-1:]).text == ""
