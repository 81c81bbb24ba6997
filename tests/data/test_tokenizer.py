"""Tokenizers made here encode what they say, and survive being saved in Hugging Face's form; pretrained ones load."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer, PretrainedTokenizer, with_stop_ids
from jaxrl_llm.experience import Prompt, SamplingParams

TEXTS = ["47+85=132", "a b  c\n", "", "=="]
UNICODE = ["naïve café ☕", "\x00\t\r\n", "日本", " two  spaces ", "it 's ."]


def test_characters_have_the_ids_after_pad_bos_and_eos() -> None:
    tokenizer = CharTokenizer(alphabet="0123456789+= \nabc").load()
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer("47+0=")["input_ids"] == [7, 10, 13, 3, 14] and len(tokenizer) == 20
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS] == TEXTS
    assert tokenizer.decode([1, 7, 10, 2], skip_special_tokens=True) == "47"


def test_bytes_have_the_ids_from_3() -> None:
    tokenizer = ByteTokenizer().load()
    for text in UNICODE:
        ids = tokenizer(text)["input_ids"]
        assert [i - 3 for i in ids] == list(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 259 and tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    "made",
    [CharTokenizer(alphabet="0123456789+= \nabc", add_bos=True, chat_template="{{ messages }}"), ByteTokenizer()],
)
def test_a_saved_tokenizer_loads_as_the_same_one(made: CharTokenizer | ByteTokenizer, tmp_path: Path) -> None:
    tokenizer = made.load()
    tokenizer.save_pretrained(tmp_path)
    loaded = PretrainedTokenizer(path=str(tmp_path)).load()
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, 2, len(tokenizer))
    assert loaded.chat_template == tokenizer.chat_template


def test_text_prompts_begin_with_bos_where_asked_and_responses_do_not() -> None:
    encode = Encoder(tokenizer=CharTokenizer(alphabet="12=", add_bos=True).load(), max_prompt_tokens=8)
    row = encode.demonstration(Prompt(id="p", text="1=", response="2"))
    assert row is not None and list(row.prompt.tokens) == [1, 3, 5] and list(row.tokens) == [4, 2]  # type: ignore[arg-type]


def test_a_character_outside_the_alphabet_names_the_prompt() -> None:
    encode = Encoder(tokenizer=CharTokenizer(alphabet="123").load(), max_prompt_tokens=8)
    with pytest.raises(ValueError, match=r"prompt 'p': the tokenizer cannot encode '12x'"):
        encode.prompt(Prompt(id="p", text="12x"))


def test_the_plain_chat_template_writes_turns_and_opens_the_answer() -> None:
    tokenizer = ByteTokenizer().load()
    row = Encoder(tokenizer=tokenizer, max_prompt_tokens=64).prompt(
        Prompt(id="p", messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}])
    )
    assert row is not None and tokenizer.decode(row.tokens) == "system: Be short.\nuser: Hi\nassistant: "


@pytest.fixture
def qwen3(real_data: Path, tmp_path: Path) -> Path:
    source = real_data / "tokenizers" / "qwen3"
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    return tmp_path


def test_keyword_arguments_reach_qwen3s_chat_template(qwen3: Path) -> None:
    tokenizer = PretrainedTokenizer(path=str(qwen3)).load()
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "2+2?"}])
    turn = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    for kwargs, ending in (({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        row = Encoder(tokenizer=tokenizer, max_prompt_tokens=64, template_kwargs=kwargs).prompt(prompt)
        assert row is not None and tokenizer.decode(row.tokens) == turn + ending
        assert row.tokens is not None and row.tokens[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_a_response_ends_with_each_id_that_the_models_generation_settings_name(tmp_path: Path) -> None:
    CharTokenizer(alphabet="01").load().save_pretrained(tmp_path)
    settings = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    assert with_stop_ids(settings, PretrainedTokenizer(path=str(tmp_path)).load()).stop_token_ids == (9, 2)
    for named, ends in ((4, (9, 2, 4)), ([4, 2, 3], (9, 2, 4, 3))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert with_stop_ids(settings, PretrainedTokenizer(path=str(tmp_path)).load()).stop_token_ids == ends
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match=r"generation_config\.json"):
        PretrainedTokenizer(path=str(tmp_path)).load()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"has no tokenizer \(\['weights.bin'\]\): name a folder with tokenizer.json"
    ):
        PretrainedTokenizer(path=str(tmp_path)).load()


def test_a_repeated_character_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"each character once \(got '0120', repeated: \['0'\]\)"):
        CharTokenizer(alphabet="0120")
