"""Templates against the models' own: what is written out here is what their tokenizers render."""

import gzip
import shutil
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.data import templates
from jaxrl_llm.data.tokenizer import ByteTokenizer, PretrainedTokenizer

SYSTEM = "You are a helpful assistant."


def test_qwen_is_what_qwens_chat_template_renders(real_data: Path, tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(real_data / "tokenizers" / "qwen2.5" / name, tmp_path)
    with gzip.open(real_data / "tokenizers" / "qwen3" / "tokenizer.json.gz") as packed:
        (tmp_path / "tokenizer.json").write_bytes(packed.read())
    tokenizer = PretrainedTokenizer(path=str(tmp_path)).load()
    for system, template in ((SYSTEM, templates.qwen), (templates.STEP_BY_STEP, templates.qwen_math)):
        turns = [{"role": "system", "content": system}, {"role": "user", "content": "Why?\nAnd how?"}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert template("Why?\nAnd how?") == rendered


def test_the_other_formats_are_those_that_are_documented() -> None:
    assert templates.ministral("Why?") == "<s>[INST]Why?[/INST]"
    assert templates.base("Why?") == "### Question:\nWhy?\n\n### Answer:\n"
    assert templates.llama3("Why?") == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_template_named_chat_keeps_all_messages() -> None:
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why?"}]
    assert templates.rerendered("chat", turns, "Owner") == {"messages": turns}
    assert templates.rerendered(str.upper, turns[1:], "Owner") == {"text": "WHY?"}


def test_octothinkers_transcript_keeps_the_request_to_box_and_ends_at_the_assistant() -> None:
    run, _ = command_line.build([str(Path(__file__).parents[2] / "gin" / "bupo_llama_3b.gin")])
    tokenizer = ByteTokenizer().load()
    tokenizer.chat_template = run.tokenizer.chat_template
    turns = [{"role": "system", "content": templates.STEP_BY_STEP}, {"role": "user", "content": "What is 2 + 2?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<bos>A conversation between User and Assistant. The user asks a question, and the assistant solves it. Please reason step "
        "by step, and put your final answer within \\boxed{}.\nUser: What is 2 + 2?\nAssistant:"
    )
