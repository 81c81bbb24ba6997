"""Text from outside is text: whatever it spells, no control id comes of it."""

import numpy as np
import pytest
from agents.chat_tokenizers import MARKUP, QWEN25, SPECIAL, chat_tokenizer
from tokenizers import AddedToken

from jaxrl_llm.agents.outside import Disguise, OutsideEncoder, cleaned
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer


def test_a_disguise_keeps_what_trims_and_escapes_and_comes_off():
    text = 'Ünï "two"\\\n\t <|im_end|>\u2003\x07 \ue000\U000f0000 𝕏'
    disguise = Disguise([text, ["<a>", {"key": "b"}]])
    hidden = disguise.text(text)
    assert len(hidden) == len(text) and disguise.removed(hidden) == text
    for before, after in zip(text, hidden):
        kept = before in '"\\\n\t\u2003\x07 '
        assert (before == after) if kept else ("\ue000" <= after <= "\uf8ff")
    assert disguise.value({"key": ["<a>", 3, None, True]}).keys() != {"key"}
    assert disguise.removed(next(iter(disguise.value({"key": 1})))) == "key"


def test_a_disguise_leaves_what_templates_look_up_in_schemas():
    schema = {
        "type": "function",
        "function": {"name": "type", "parameters": {"properties": {"<think>": {"type": "<x>"}}}},
    }
    disguise = Disguise([schema])
    hidden = disguise.schema(schema)
    assert hidden["type"] == "function"
    assert hidden["function"]["name"] != "type"
    ((key, value),) = hidden["function"]["parameters"]["properties"].items()
    assert disguise.removed(key) == "<think>" and key != "<think>"
    assert disguise.removed(value["type"]) == "<x>" and value["type"] != "<x>"


def test_private_characters_of_the_template_are_not_used():
    assert Disguise(["ab"], template="\ue000 and \ue002").text("ab") == "\ue001\ue003"


def test_half_surrogates_are_replaced():
    assert cleaned("a\ud800b") == "a?b"
    encoder = OutsideEncoder(chat_tokenizer(QWEN25))
    assert encoder.text("a\ud800b") == encoder.text("a?b")


@pytest.mark.parametrize("text", [*SPECIAL, *MARKUP])
def test_added_tokens_are_spelled_out(text):
    tokenizer = chat_tokenizer(QWEN25)
    own = tokenizer.convert_tokens_to_ids(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [own]
    ids = OutsideEncoder(tokenizer).text(f"a {text} b")
    assert own not in ids and tokenizer.decode(ids) == f"a {text} b"


def test_harmless_text_gets_the_ids_of_the_tokenizer():
    tokenizer = chat_tokenizer(QWEN25)
    for text in ("Hello  there\n\n\n  you're 12", "", "  \n", "e\u0301 = é, 中文"):
        assert OutsideEncoder(tokenizer).text(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_added_tokens_of_white_space_are_text():
    tokenizer = chat_tokenizer(QWEN25, (AddedToken("    ", normalized=False),))
    four = tokenizer.convert_tokens_to_ids("    ")
    assert four in OutsideEncoder(tokenizer).text("x    y")


def test_white_space_beside_tokens_that_strip_it_goes():
    tokenizer = chat_tokenizer(QWEN25, (AddedToken("<|end|>", normalized=False, rstrip=True, lstrip=True),))
    encoder, disguise = OutsideEncoder(tokenizer), Disguise([" a ", " b "])
    rendering = f"{disguise.text(' a ')}<|end|>{disguise.text(' b ')}<|im_end|>"
    assert (
        encoder.rendered(rendering, disguise)
        == tokenizer(" a <|end|> b <|im_end|>", add_special_tokens=False)["input_ids"]
    )


def test_the_tokenizers_of_the_project_encode_text_alone():
    char = CharTokenizer(alphabet="0123456789+=<>eosb").load()
    assert char.decode(OutsideEncoder(char).text("<eos>12")) == "<eos>12"
    assert char("<eos>", add_special_tokens=False)["input_ids"] == [char.eos_token_id]
    assert char.eos_token_id not in OutsideEncoder(char).text("<eos>12")
    byte = ByteTokenizer().load()
    assert np.array_equal(OutsideEncoder(byte).text("<eos>é"), [3 + b for b in "<eos>é".encode()])
    with pytest.raises(ValueError, match="cannot encode"):
        OutsideEncoder(char).text("?")


def test_a_tokenizer_that_makes_control_ids_of_text_is_refused():
    char = CharTokenizer(alphabet="abc").load()
    char.add_tokens(["b"])
    with pytest.raises(ValueError, match="'b'"):
        OutsideEncoder(char)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="object is no fast tokenizer"):
        OutsideEncoder(object())
