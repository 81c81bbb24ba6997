"""The tokenizers and chat templates of public models, from the folder of real data; those of the other tests write what they write."""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
from agents.chat_tokenizers import ADD, TEMPLATES, chat_tokenizer
from agents.test_rendering import TALK, plain
from transformers import AutoTokenizer

from jaxrl_llm.agents.rendering import Rendering

NAMES = ("qwen2.5", "qwen3", "smollm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(params=NAMES)
def real(request, real_data, folder):
    """A model's name and its tokenizer; Qwen2.5's has the ids of Qwen3's and its own template."""
    name = request.param
    source, to = real_data / "tokenizers", folder / name.replace(".", "_")
    kept = source / ("qwen3" if name == "qwen2.5" else name)
    if not to.is_dir():
        to.mkdir()
        (to / "tokenizer.json").write_bytes(gzip.decompress((kept / "tokenizer.json.gz").read_bytes()))
        (to / "tokenizer_config.json").write_bytes((kept / "tokenizer_config.json").read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(to)
    if (written := source / name / "chat_template.jinja").is_file():
        tokenizer.chat_template = written.read_text()
    return name, tokenizer


def test_the_templates_of_the_tests_write_what_the_real_ones_write(real):
    name, tokenizer = real
    if name not in TEMPLATES:
        pytest.skip("the tests have no template of this model")
    ours = chat_tokenizer(TEMPLATES[name])
    for length in range(1, len(TALK) + 1):
        for tools in (None, [ADD], [ADD, ADD]):
            for first in (0, 1):
                for kwargs in ({}, {"enable_thinking": False}):
                    for opened in (True, False):
                        if messages := TALK[first:length]:
                            given = {"tools": tools, "tokenize": False, "add_generation_prompt": opened, **kwargs}
                            wanted = tokenizer.apply_chat_template(messages, **given)
                            assert ours.apply_chat_template(messages, **given) == wanted


def test_harmless_conversations_get_the_ids_of_the_plain_rendering(real):
    name, tokenizer = real
    made = Rendering(tokenizer)
    talk = [m for m in TALK if m["role"] != "tool"] if name == "smollm2" else TALK
    for tools in ((),) if name == "smollm2" else ((), (ADD,)):
        for length in range(1, len(talk) + 1):
            assert made.prompt(talk[:length], tools).tolist() == plain(made, talk[:length], tools)


def test_text_from_outside_never_becomes_a_control_token(real):
    name, tokenizer = real
    made, chance, forged = Rendering(tokenizer), random.Random(3), 0
    spelled = tokenizer.get_added_vocab()
    own, roles = set(spelled.values()), ("system", "user") if name == "smollm2" else ("system", "user", "tool")
    words = ["x", " ", "\n", "<|im_", "end|>", "<", "tool_call", ">", "assistant\n", "é", "中", "\ue000"]
    for _ in range(200):
        texts = ["".join(chance.choice([*spelled, *words]) for _ in range(8)) for _ in roles]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        harmless = [{"role": role, "content": "word"} for role in roles]
        wanted = [i for i in plain(made, harmless) if i in own]
        ids = made.prompt(messages)
        assert [i for i in ids.tolist() if i in own] == wanted
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        forged += [i for i in plain(made, messages) if i in own] != wanted
    assert forged > 190


def test_a_bridge_has_the_ids_that_another_implementation_gave(real):
    # Recorded from the renderers package 0.1.12 with Qwen3's tokenizer; a result "132" after an answer that stopped.
    recorded = [198, 151644, 872, 198, 151665, 198, 16, 18, 17, 198, 151666, 151645, 198, 151644, 77091, 198]
    name, tokenizer = real
    if name == "smollm2":
        pytest.skip("recorded with Qwen3's tokenizer")
    made = Rendering(tokenizer)
    prior = np.concatenate([made.prompt(TALK[:2], [ADD]), [40, 151645]]).astype(np.int32)
    result = [{"role": "tool", "content": "132", "tool_call_id": "c1"}]
    assert made.bridge(prior, "stop", result)[len(prior) :].tolist() == recorded
    assert made.bridge(prior[:-1], "length", result)[len(prior) - 1 :].tolist() == [151645, *recorded]
    assert made.stop_token_ids[0] == 151645
