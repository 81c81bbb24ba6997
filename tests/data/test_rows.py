"""Rows as people have them: every kind of source gives the same prompts, columns are recognised, and bad rows are named."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data import rows as rows_module
from jaxrl_llm.data import tokenizer
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.rows import Rows
from jaxrl_llm.experience import Prompt
from jaxrl_llm.rollouts import offline
from jaxrl_llm.train.build import content_of

TWO = [
    {"prompt": "1 + 1 =", "answer": "2", "level": "easy"},
    {"prompt": "12 * 12 =", "answer": "144", "level": "hard"},
]


def jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def held(prompt: Prompt) -> tuple[Any, ...]:
    return prompt.messages, prompt.reference, prompt.extra


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


EXPECTED = [
    ([user("1 + 1 =")], "2", {"answer": "2", "level": "easy", "prompt": "1 + 1 ="}),
    ([user("12 * 12 =")], "144", {"answer": "144", "level": "hard", "prompt": "12 * 12 ="}),
]


def sources(folder: Path) -> dict[str, Any]:
    """The two rows in every form that is read."""
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(TWO)
    whole.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(folder / "splits")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TWO), folder / "rows.parquet")
    (folder / "rows.json").write_text(json.dumps(TWO))
    (folder / "rows.csv").write_text('prompt,answer,level\n1 + 1 =,2,easy\n"12 * 12 =",144,hard\n')
    for name in ("parts", "halves"):
        (folder / name).mkdir()
    jsonl(folder / "halves" / "train.jsonl", TWO)
    jsonl(folder / "parts" / "a.jsonl", TWO[:1])
    jsonl(folder / "parts" / "b.jsonl", TWO[1:])
    files = {
        n: str(folder / n) for n in ("saved", "splits", "rows.parquet", "rows.json", "rows.csv", "halves", "parts")
    }
    return files | {"list": TWO, "rows.jsonl": jsonl(folder / "rows.jsonl", TWO)}


def test_every_kind_of_source_gives_the_same_prompts(tmp_path: Path) -> None:
    for name, source in sources(tmp_path).items():
        assert [held(prompt) for prompt in Rows(source=source).rows()] == EXPECTED, name


def test_a_dataset_is_asked_of_the_hub_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return datasets.Dataset.from_list(TWO)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [held(p) for p in Rows(source="owner/sums", subset="small", split="test").rows()] == EXPECTED
    assert asked == [(("owner/sums", "small"), {"split": "test"})]


def test_a_dataset_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    for source in ("owner/sums", str(tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"needs the package `datasets`: pip install datasets, or name"):
            Rows(source=source).rows()


def test_what_is_recognised_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_said", set())
    source = [{"question": "1 + 1 =", "solution": 2, "unit": "m"}]
    for _ in range(2):
        (row,) = Rows(source=source).rows()
    assert (row.question, row.reference, row.extra["unit"]) == ("1 + 1 =", "2", "m")
    assert capsys.readouterr().out == (
        "rows of rows: prompt from 'question', reference from 'solution'; further columns ['unit'] "
        "(rows.Rows.prompt, response and reference name other columns)\n"
    )


def test_columns_are_named_by_bindings() -> None:
    source = [{"ask": "1 + 1 =", "prompt": "unused", "gold": 2.5, "said": "It is 2."}]
    (row,) = Rows(source=source, prompt="ask", reference="gold", response="said", template="question_only").rows()
    assert (row.text, row.reference, row.response, row.extra["prompt"]) == ("1 + 1 =", "2.5", "It is 2.", "1 + 1 =")
    with pytest.raises(
        ValueError, match=r"row 0 of the list: rows.Rows.prompt='asked' names no column; the row has \['ask'"
    ):
        Rows(source=source, prompt="asked").rows()


def test_messages_that_end_with_the_assistant_are_a_demonstration() -> None:
    turns = [{"role": "system", "content": "Be brief."}, user("1 + 1 ="), {"role": "assistant", "content": "2"}]
    (row,) = Rows(source=[{"messages": turns}]).rows()
    assert (row.messages, row.response, row.extra) == (turns[:2], "2", {"prompt": turns[:2]})
    (alone,) = Rows(source=[{"messages": turns[:2]}]).rows()
    assert (alone.messages, alone.response) == (turns[:2], None)
    chat = {"prompt": turns[:2], "completion": [{"role": "assistant", "content": "two"}], "label": False}
    (labelled,) = Rows(source=[chat]).rows()
    assert (labelled.messages, labelled.response, labelled.extra["desirable"]) == (turns[:2], "two", False)


def encoder() -> Encoder:
    return Encoder(tokenizer=tokenizer.ByteTokenizer().load(), max_prompt_tokens=99, max_response_tokens=99)


def test_rows_become_demonstrations_and_pairs_as_sft_and_dpo_learn_from_them() -> None:
    (group,) = offline.demonstrations(encoder(), Rows(source=[{"prompt": "1 + 1 =", "completion": "2"}]).rows())
    assert [rollout.text for rollout in group.rollouts] == ["2"]
    sides = {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3", "margin": 4}
    wholes = {side: [user("1 + 1 ="), {"role": "assistant", "content": sides[side]}] for side in ("chosen", "rejected")}
    for source in (sides, wholes, {"question": "1 + 1 =", **wholes}):
        pairs = Rows(source=[source]).rows()
        (group,) = offline.pairs(encoder(), pairs)
        assert [rollout.text for rollout in group.rollouts] == ["2", "3"]
        assert group.scores.parts["log/side"].tolist() == [1, -1]
        assert encoder().tokenizer.decode(group.rollouts[0].prompt.prefix) == "user: 1 + 1 =\nassistant: "
    assert Rows(source=[sides]).rows()[0].extra["margin"] == 4


BAD = {
    '{"prompt": \n': r"bad.jsonl:2: malformed JSON .*; each line must be one JSON object",
    "[1, 2]\n": r"bad.jsonl:2: expected a JSON object with columns \(got list\)",
    '{"prompt": 5}\n': r"bad.jsonl:2: column 'prompt' must be a text that is not blank, or a list of messages .*\(got int 5\)",
    '{"prompt": "  "}\n': r"bad.jsonl:2: column 'prompt' must be a text that is not blank.*\(got str '  '\)",
    '{"ask": "?"}\n': r"bad.jsonl:2: column 'prompt' must be .*\(got NoneType None\)",
    '{"prompt": [{"role": "assistant", "content": "2"}]}\n': r"bad.jsonl:2: the messages of column 'prompt' must have one of role 'user'",
    '{"prompt": "?", "answer": ["2"]}\n': r"bad.jsonl:2: column 'answer' is the reference and must be a text or a number \(got list\)",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_named_with_what_it_has(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' + line)
    with pytest.raises(ValueError, match=BAD[line]):
        Rows(source=str(file)).rows()


def test_a_bad_pair_a_bad_response_and_no_prompt_are_refused() -> None:
    good = {"prompt": "?", "chosen": "a", "rejected": "b"}
    with pytest.raises(
        ValueError, match=r"row 1 of the list: no preference pair \(same_answers\): wanted are a prompt and two"
    ):
        Rows(source=[good, {"prompt": "?", "chosen": "a", "rejected": "a"}]).rows()
    with pytest.raises(ValueError, match=r"row 1 of the list: no preference pair \(malformed\)"):
        Rows(source=[good, {"prompt": "?", "chosen": "a"}]).rows()
    with pytest.raises(
        ValueError, match=r"column 'completion' must be a text, or a list of one message .*\(got int 2\)"
    ):
        Rows(source=[{"prompt": "?", "completion": 2}]).rows()
    with pytest.raises(
        ValueError, match=r"no column is recognised as the prompt; the row has \['ask'\] and prompt, messages"
    ):
        Rows(source=[{"ask": "?"}]).rows()
    with pytest.raises(
        ValueError, match=r"must be a path, a dataset id or a list of mappings .*\(got list of \['str'\]\)"
    ):
        Rows(source=["a.jsonl"])
    with pytest.raises(ValueError, match=r"empty list"):
        Rows(source=[]).rows()


def test_heldout_rows_are_a_fixed_share_of_the_prompts() -> None:
    source = [{"prompt": f"{i % 20} + 1 =", "copy": i} for i in range(40)]  # each prompt twice
    parts = {s: Rows(source=source, heldout_share=0.2, split=s).rows() for s in ("train", "heldout")}
    texts = {split: {row.question for row in rows} for split, rows in parts.items()}
    assert (len(texts["heldout"]), len(parts["heldout"]), len(parts["train"])) == (4, 8, 32)
    assert not texts["heldout"] & texts["train"]
    shuffled = Rows(source=source[::-1], heldout_share=0.2, split="heldout").rows()
    assert {row.question for row in shuffled} == texts["heldout"]
    assert len(Rows(source=source).rows()) == len(Rows(source=source, split="heldout").rows()) == 40
    with pytest.raises(
        ValueError, match=r"would hold out one of 1 different prompts of rows: give more, or set it to 0"
    ):
        Rows(source=source[:1], heldout_share=0.5).rows()
    with pytest.raises(
        ValueError, match=r"rows.Rows.split='test': a file or a list has no splits but 'train' and 'heldout'"
    ):
        Rows(source=source, split="test").rows()


def test_any_changed_column_changes_the_content_that_a_resume_compares(tmp_path: Path) -> None:
    first = content_of(Rows(source=jsonl(tmp_path / "a.jsonl", TWO)).rows())
    (tmp_path / "elsewhere").mkdir()
    assert content_of(Rows(source=jsonl(tmp_path / "elsewhere" / "a.jsonl", TWO)).rows()) == first
    assert content_of(Rows(source=jsonl(tmp_path / "a.jsonl", [TWO[0], TWO[1] | {"level": "odd"}])).rows()) != first
