"""Rows in verl's schema: read as they are, mixed by weight, and refused with the binding to change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data import templates
from jaxrl_llm.data.parquet_rows import ParquetRows

ASKED = [{"role": "user", "content": "2 + 2?"}]


def verl(**changed: Any) -> dict[str, Any]:
    usual = {
        "data_source": "sums",
        "prompt": ASKED,
        "reward_model": {"style": "rule", "ground_truth": "4", "hint": "even"},
        "extra_info": {"index": 0, "split": "train"},
        "level": 1,
    }
    return {**usual, **changed}


def file(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "train.parquet") -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / name)
    return str(folder / name)


def test_a_row_keeps_its_prompt_reference_source_and_further_columns(tmp_path: Path) -> None:
    (row,) = ParquetRows(path=file(tmp_path, [verl()])).rows()
    assert (row.messages, row.text, row.reference, row.source, row.response) == (ASKED, None, "4", "sums", None)
    assert row.id == "sums/train/0"
    assert row.extra == {
        "level": 1,
        "style": "rule",
        "ground_truth": "4",
        "hint": "even",
        "index": 0,
        "split": "train",
    }


def test_the_answer_and_the_demonstration_are_where_the_bindings_say(tmp_path: Path) -> None:
    truth = {"target": 4, "numbers": [2, 2]}
    path = file(tmp_path, [verl(reward_model={"ground_truth": truth}, extra_info={"answer": "It is 4."})])
    (row,) = ParquetRows(path=path, reference="reward_model.ground_truth.target", response="extra_info.answer").rows()
    assert (row.reference, row.response, row.extra["ground_truth"]) == ("4", "It is 4.", truth)
    with pytest.raises(ValueError, match=r"row 0: 'reward_model.ground_truth' is no single value but a dict; it has "):
        ParquetRows(path=path).rows()
    with pytest.raises(ValueError, match=r"nothing at 'reward_model.answer' \('answer' is not in \['ground_truth'\]\)"):
        ParquetRows(path=path, reference="reward_model.answer").rows()
    judged = file(tmp_path, [verl(reward_model={"ground_truth": None})], "judged.parquet")
    assert ParquetRows(path=judged).rows()[0].reference == ""
    bare = file(tmp_path, [{"prompt": "2 + 2?"}], "bare.parquet")
    (row,) = ParquetRows(path=bare, reference="", source="chat").rows()
    assert (row.messages, row.source) == (ASKED, "chat")


def test_a_template_takes_rows_of_one_message(tmp_path: Path) -> None:
    path = file(tmp_path, [verl()])
    assert ParquetRows(path=path, template="r1_zero").rows()[0].text == templates.r1_zero("2 + 2?")
    assert ParquetRows(path=path, template="question_only").rows()[0].text == "2 + 2?"
    two = file(tmp_path, [verl(prompt=[{"role": "system", "content": "Be brief."}, *ASKED])], "two.parquet")
    assert [m["role"] for m in ParquetRows(path=two).rows()[0].messages or ()] == ["system", "user"]
    with pytest.raises(ValueError, match=r"ParquetRows.template='qwen' takes one message and the row has \['system'"):
        ParquetRows(path=two, template="qwen").rows()


def test_weights_repeat_rows_and_choose_some_of_them(tmp_path: Path) -> None:
    paths = [
        file(tmp_path, [verl(data_source=name, prompt=f"{name} {i}") for i in range(10)], f"{name}.parquet")
        for name in "abc"
    ]
    rows = ParquetRows(path=paths, weights=[2, 0.5, 1.3]).rows()
    assert Counter(row.source for row in rows) == {"a": 20, "b": 5, "c": 13}
    often = Counter((row.messages or ())[0]["content"] for row in rows)
    assert {often[f"a {i}"] for i in range(10)} == {2} and sorted(often[f"c {i}"] for i in range(10)) == [1] * 7 + [
        2
    ] * 3
    assert len({row.id for row in rows}) == len(rows)
    assert rows == ParquetRows(path=paths, weights=[2, 0.5, 1.3]).rows()
    assert rows != ParquetRows(path=paths, weights=[2, 0.5, 1.3], seed=1).rows()
    assert len(ParquetRows(path=paths).rows()) == 30 and len(ParquetRows(path=paths, limit=4).rows()) == 12


def test_bad_rows_and_bindings_are_named(tmp_path: Path) -> None:
    path = file(tmp_path, [{"prompt": ASKED, "reward_model": {"ground_truth": "4"}}])
    with pytest.raises(ValueError, match=r"train.parquet, row 0: no value in column 'data_source'"):
        ParquetRows(path=path).rows()
    with pytest.raises(ValueError, match=r"column 'prompt' must hold chat messages .* \(got list\)"):
        ParquetRows(path=file(tmp_path, [verl(prompt=[{"text": "2 + 2?"}])])).rows()
    with pytest.raises(ValueError, match=r"weights must be one number above 0 for each of 2 paths \(got \[1\]\)"):
        ParquetRows(path=["a.parquet", "b.parquet"], weights=[1])
    with pytest.raises(ValueError, match=r"ParquetRows.path is empty"):
        ParquetRows(path=[])
    with pytest.raises(ValueError, match=r"ParquetRows.template must be one of"):
        ParquetRows(path=path, template="none")


@pytest.mark.parametrize(
    ("name", "rows", "place", "first"),
    [
        ("math/train.parquet", 7500, "reward_model.ground_truth.target", "0"),
        ("deepmath/deepmath-5k.parquet", 5000, "reward_model.ground_truth", "\\infty"),
        ("bupo/aime_2024.parquet", 30, "reward_model.ground_truth", "540"),
        ("bupo/aime_2025.parquet", 30, "reward_model.ground_truth", "70"),
        ("bupo/amc2023.parquet", 40, "reward_model.ground_truth", "27"),
        ("bupo/math500.parquet", 500, "reward_model.ground_truth", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ],
)
def test_published_files_are_read_whole(real_data: Path, name: str, rows: int, place: str, first: str) -> None:
    found = ParquetRows(path=str(real_data / name), reference=place).rows()
    assert len(found) == rows and found[0].reference == first
    assert all(row.messages and row.messages[-1]["role"] == "user" for row in found)
    assert sum(not row.reference for row in found) == (4 if name.startswith("math/") else 0)  # targets that are empty
