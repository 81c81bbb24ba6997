"""GSM8K and other files: prompts by template, gold answers, and bad data named by file and row."""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data import templates
from jaxrl_llm.data.gsm8k import GSM8K
from jaxrl_llm.data.sft import Demonstrations

ROWS = [
    {"question": "How many?", "answer": "First 1,000.\n#### 1,234"},
    {"question": "And now?", "answer": "Less #### than\n#### -5"},
    {"question": "Half?", "answer": "#### 0.5"},
]


def write(folder: Path, name: str, rows: Sequence[Any]) -> Path:
    file = folder / name
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet", "train-00000-of-00001.parquet"])
def test_a_file_and_a_folder_give_the_same_prompts(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, name, ROWS)
    rows = GSM8K(path=str(file), template="base").rows()
    assert [row.reference for row in rows] == ["1234", "-5", "0.5"]
    assert [row.text for row in rows] == [f"### Question:\n{row['question']}\n\n### Answer:\n" for row in ROWS]
    assert [row.response for row in rows] == [row["answer"] for row in ROWS]
    assert rows == GSM8K(path=str(tmp_path), template="base").rows()
    assert [row.id for row in rows] == ["gsm8k/train/0", "gsm8k/train/1", "gsm8k/train/2"]
    assert len(GSM8K(path=str(file), limit=2).rows()) == 2


def test_bad_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, "train.jsonl", [ROWS[0], "{broken", ROWS[1]])
    with pytest.raises(ValueError, match=r"train.jsonl:2: malformed JSON"):
        GSM8K(path=str(file)).rows()
    write(tmp_path, "train.jsonl", [ROWS[0], "", {"question": "q", "solution": "s"}])
    with pytest.raises(
        ValueError, match=r"train.jsonl:3: no value in column 'answer'; the row has \['question', 'solution'\]"
    ):
        GSM8K(path=str(file)).rows()
    write(tmp_path, "train.jsonl", [{"question": "q", "answer": "seven"}])
    with pytest.raises(ValueError, match=r"train.jsonl:1: no gold answer after '#### '.*'seven'"):
        GSM8K(path=str(file)).rows()
    write(tmp_path, "train.jsonl", ["[1]"])
    with pytest.raises(ValueError, match=r"train.jsonl:1: expected a JSON object.*got list"):
        GSM8K(path=str(file)).rows()


def test_gzipped_lines_and_a_folder_of_the_subset_are_read(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    with gzip.open(tmp_path / "main" / "train.jsonl.gz", "wt") as lines:
        lines.writelines(f"{json.dumps(row)}\n" for row in ROWS)
    for path in (tmp_path, tmp_path / "main", tmp_path / "main" / "train.jsonl.gz"):
        assert [row.reference for row in GSM8K(path=str(path)).rows()] == ["1234", "-5", "0.5"]


def test_bad_files_are_named_with_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data at '.*none.jsonl'"):
        GSM8K(path=str(tmp_path / "none.jsonl")).rows()
    with pytest.raises(FileNotFoundError, match=r"no file for split 'test'.*it holds \['train.jsonl'\]"):
        write(tmp_path, "train.jsonl", [])
        GSM8K(path=str(tmp_path), split="test").rows()
    with pytest.raises(ValueError, match=r"has no rows in split 'train'"):
        GSM8K(path=str(tmp_path)).rows()
    with pytest.raises(ValueError, match=r"row 1: no value in column 'answer'"):
        GSM8K(path=str(write(tmp_path, "some.parquet", [ROWS[0], {"question": "q"}]))).rows()
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"bad.parquet: not a readable Parquet file"):
        GSM8K(path=str(tmp_path / "bad.parquet")).rows()
    (tmp_path / "rows.txt").write_text("a,b")
    with pytest.raises(ValueError, match=r"unknown kind of data file '.txt'; .*.jsonl"):
        GSM8K(path=str(tmp_path / "rows.txt")).rows()
    with pytest.raises(ValueError, match=r"limit must be at least 1"):
        GSM8K(path=str(tmp_path), limit=0).rows()


def test_training_problems_to_choose_settings_on_are_none_that_are_learned_from(tmp_path: Path) -> None:
    file = str(write(tmp_path, "train.jsonl", ROWS))
    chosen, learned = GSM8K(path=file, limit=1).rows(), GSM8K(path=file, skip=1).rows()
    assert [row.id for row in chosen] == ["gsm8k/train/0"]
    assert [row.id for row in learned] == ["gsm8k/train/1", "gsm8k/train/2"]
    assert [row.reference for row in (*chosen, *learned)] == ["1234", "-5", "0.5"]
    assert [row.id for row in GSM8K(path=file, skip=1, limit=1).rows()] == ["gsm8k/train/1"]
    with pytest.raises(ValueError, match=r"no rows in split 'train' after the first 3"):
        GSM8K(path=file, skip=3).rows()
    with pytest.raises(ValueError, match=r"skip must be at least 0 \(got -1\)"):
        GSM8K(path=file, skip=-1).rows()


def test_a_dataset_id_needs_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"'openai/gsm8k' is no local path.*pip install datasets"):
        GSM8K().rows()


def test_a_dataset_id_is_read_through_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str, *, split: str) -> list[dict[str, str]]:
        asked.append((path, name, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = GSM8K(split="test", template="question_only").rows()
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (rows[0].text, rows[0].reference) == ("How many?", "1234")


def test_the_real_files_have_their_published_sizes_and_numeric_answers(real_data: Path) -> None:
    train, test = (GSM8K(path=str(real_data / "gsm8k"), split=split).rows() for split in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert all(float(row.reference) == float(row.reference) for row in [*train, *test])
    assert test[0].reference == "18" and not {str(r.messages) for r in train} & {str(r.messages) for r in test}


def test_templates_hold_the_question_and_open_the_answer() -> None:
    endings = {
        "base": "\n\n### Answer:\n",
        "r1_zero": "\nAssistant: <think>",
        "alpaca": "\n\n### Response:\n",
        "qwen": "<|im_start|>assistant\n",
        "qwen_math": "<|im_start|>assistant\n",
        "ministral": "[INST]Why?[/INST]",
        "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "question_only": "Why?",
    }
    for name, ending in endings.items():
        asked = templates.TEMPLATES[name]("Why?")
        assert isinstance(asked, str) and asked.count("Why?") == 1 and asked.endswith(ending)
    assert templates.chat("Why?") == [{"role": "user", "content": "Why?"}]
    assert "\\boxed{}" in str(templates.chat_boxed("Why?")[0]["content"])
    assert "\\boxed{}" in str(templates.chat_boxed_python("Why?")[0]["content"])
    assert set(endings) | {"chat", "chat_boxed", "chat_boxed_short", "chat_boxed_python", "chat_boxed_blocks"} == set(
        templates.TEMPLATES
    )
    assert "User: Why?\nAssistant: <think>" in str(templates.r1_zero("Why?"))


def test_a_function_is_a_template_and_an_unknown_name_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, "train.jsonl", ROWS)
    assert GSM8K(path=str(file), template=str.upper).rows()[0].text == "HOW MANY?"
    with pytest.raises(ValueError, match=r"GSM8K.template must be one of .*'alpaca'.* or a function \(got 'chatml'\)"):
        GSM8K(template="chatml")


def test_demonstrations_come_from_columns_or_from_messages(tmp_path: Path) -> None:
    file = write(tmp_path, "train.jsonl", [{"instruction": "Say hi", "output": "hi"}])
    (row,) = Demonstrations(path=str(file), prompt="instruction", response="output", template="question_only").rows()
    assert (row.text, row.response) == ("Say hi", "hi")
    turns = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "hi"}]
    write(tmp_path, "train.jsonl", [{"messages": turns}])
    (row,) = Demonstrations(path=str(file), messages="messages").rows()
    assert row.messages == turns[:1] and row.response == "hi"
    write(tmp_path, "train.jsonl", [{"messages": turns}, {"messages": turns[:1]}])
    with pytest.raises(ValueError, match=r"train.jsonl:2: column 'messages' must be a list.*of role 'assistant'"):
        Demonstrations(path=str(file), messages="messages").rows()
