"""Preparation: rows in verl's schema, every row accounted for, files whole or untouched."""

import json
import runpy
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from prepared_rows import VERL, asked, run, source, truths, written

from jaxrl_llm.data import templates
from jaxrl_llm.data.parquet_rows import ParquetRows
from jaxrl_llm.data.prepare import contamination, preparation
from jaxrl_llm.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent.parent
COMMANDS = sorted(f.stem for f in (ROOT / "data").rglob("*.py") if "__main__" in f.read_text())


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    if row["a"] is None:
        raise preparation.Drop("no_answer")
    return preparation.Item(question=row["q"], truth=row["a"], info={"kept": row["a"] * 2})


PLAIN = preparation.Preparation(name="plain", source="owner/plain", convert=convert, columns=("q",))
ROWS = [{"q": f"What is {i}?", "a": str(i)} for i in range(10)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"jaxrl_llm.data.prepare.{name}", raising=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"jaxrl_llm.data.prepare.{name}", run_name="__main__")
    assert f"python -m jaxrl_llm.data.prepare.{name}" in " ".join(capsys.readouterr().out.split())


def test_the_commands_are_those_of_the_data_sets() -> None:
    assert COMMANDS == [
        "anthropic_hh_rlhf",
        "beavertails",
        "competition_math",
        "countdown",
        "deepmath",
        "deepscaler",
        "gsm8k",
        "helpful_instructions",
        "hendrycks_math",
        "math500",
        "mmlu_sycophancy",
        "openmathreasoning",
        "preference",
        "svamp",
        "ultrachat",
        "wildchat",
        "wmdp",
        "wmdp_merge",
    ]


def test_a_row_has_verls_columns_and_its_content(tmp_path: Path) -> None:
    run(PLAIN, tmp_path / "out", source(tmp_path, ROWS[:2]), "--instruction", "Be brief.")
    rows = written(tmp_path / "out")
    assert rows[1] == {
        "data_source": "plain",
        "prompt": [{"role": "user", "content": "What is 1? Be brief."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 1, "question": "What is 1?", "rendered": False, "kept": "11"},
    }
    assert list(rows[0]) == VERL


def test_every_row_read_is_written_dropped_or_beyond_the_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [{"q": "none", "a": None}, {"q": " ", "a": "0"}, {"q": "what is  $3$?", "a": "3"}]
    (tmp_path / "eval").mkdir()
    avoided = source(tmp_path / "eval", [{"problem": "What is 7?"}, {"problem": "What is 70?"}], "test")
    once = preparation.Preparation(name="plain", source="", convert=convert, columns=("q",), unique=True)
    arguments = ["--against", str(avoided), "--sizes", "train=5", "test=2"]
    counts = run(once, tmp_path / "out", source(tmp_path, [*ROWS, *odd]), *arguments)
    assert counts == {
        "read": 13,
        "dropped/no_answer": 1,
        "dropped/empty": 1,
        "dropped/duplicate": 1,
        f"dropped/contaminated by {avoided}": 1,
        "written/train": 5,
        "written/test": 2,
        "unused": 2,
        "shared/test": 0,
    }
    assert truths(written(tmp_path / "out", "test")) == ["5", "6"]
    note = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert note["counts"] == counts and note["options"]["sizes"] == {"train": 5, "test": 2}
    shown = capsys.readouterr().out
    assert "read 13 rows" in shown and "1 dropped: duplicate" in shown and "2 beyond the sizes" in shown


def test_questions_that_training_and_test_share_are_counted(tmp_path: Path) -> None:
    counts = run(PLAIN, tmp_path / "out", source(tmp_path, [*ROWS, ROWS[2]]), "--sizes", "train=8", "test=-1")
    assert counts["shared/test"] == 1 and counts["written/test"] == 3


def test_the_seed_names_the_order_and_a_share_is_cut_from_it(tmp_path: Path) -> None:
    file = source(tmp_path, ROWS)
    arguments = ["--shuffle", "--sizes", "train=0.8", "test=-1"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run(PLAIN, tmp_path / name, file, *arguments, "--seed", seed)
    a, b, c = (truths(written(tmp_path / name)) for name in "abc")
    assert a == b != c and len(a) == 8 and a != sorted(a)
    assert sorted(a + truths(written(tmp_path / "a", "test"))) == [row["a"] for row in ROWS]


def test_a_text_template_is_written_out_and_not_wrapped_again(tmp_path: Path) -> None:
    run(PLAIN, tmp_path / "out", source(tmp_path, ROWS[:1]), "--template", "qwen")
    row = ParquetRows(path=str(tmp_path / "out")).rows()[0]
    assert row.text == templates.qwen("What is 0?") == asked(written(tmp_path / "out"))[0] and row.messages is None
    run(PLAIN, tmp_path / "out", source(tmp_path, ROWS[:1]))
    assert ParquetRows(path=str(tmp_path / "out")).rows()[0].messages == [{"role": "user", "content": "What is 0?"}]


def test_limits_count_the_tokens_of_the_rendered_prompt(tmp_path: Path) -> None:
    ByteTokenizer().load().save_pretrained(str(tmp_path / "bytes"))
    rows = [{"q": "x" * n, "a": "1"} for n in (3, 4, 9, 10)]
    limits = ["--tokenizer", str(tmp_path / "bytes"), "--min_tokens", "4", "--max_tokens", "9"]
    counts = run(PLAIN, tmp_path / "out", source(tmp_path, rows), *limits)
    assert [len(text) for text in asked(written(tmp_path / "out"))] == [4, 9]
    assert (counts["dropped/too_short"], counts["dropped/too_long"]) == (1, 1)
    longer = len("[INST][/INST]") + len("<s>") + 9
    limits[-1] = str(longer)
    run(PLAIN, tmp_path / "out", source(tmp_path, rows), *limits, "--template", "ministral")
    assert len(written(tmp_path / "out")) == 3


def test_a_text_template_refuses_rows_with_a_system_message(tmp_path: Path) -> None:
    told = preparation.Preparation(name="told", source="", convert=convert, system=lambda part: "Be kind.")
    file = source(tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"--template alpaca renders a question alone, and rows of told"):
        run(told, tmp_path / "out", file, "--template", "alpaca")
    run(told, tmp_path / "out", file, "--template", "alpaca", "--no_system")
    run(told, tmp_path / "out", file)
    assert written(tmp_path / "out")[0]["prompt"][0] == {"role": "system", "content": "Be kind."}


def test_bad_input_is_named_and_writes_nothing(tmp_path: Path) -> None:
    file = source(tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"--sizes asks for 11 rows of 'train', and 10 of 10 are left"):
        run(PLAIN, tmp_path / "out", file, "--sizes", "train=11")
    with pytest.raises(ValueError, match=r"no rows are left for \['train'\] of plain"):
        run(PLAIN, tmp_path / "out", source(tmp_path, [{"q": "?", "a": None}]))
    with pytest.raises(ValueError, match=r"train.jsonl:1: no row of plain \(KeyError\('a'\)\); it has \['q'\]"):
        run(PLAIN, tmp_path / "out", source(tmp_path, [{"q": "?"}]))
    with pytest.raises(ValueError, match=r"no value in column 'q'"):
        run(PLAIN, tmp_path / "out", source(tmp_path, [{"a": "1"}]))
    with pytest.raises(ValueError, match=r"--against .*has no question, problem or prompt"):
        run(PLAIN, tmp_path / "out", source(tmp_path, ROWS), "--against", str(source(tmp_path, [{"a": "1"}], "test")))
    for wrong in (["--sizes", "train=2.5"], ["--sizes", "train"], ["--limit", "0"], ["--template", "none"]):
        with pytest.raises(SystemExit):
            run(PLAIN, tmp_path / "out", file, *wrong)
    assert not (tmp_path / "out").exists()


def test_a_failure_while_writing_leaves_the_files_of_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = tmp_path / "out", source(tmp_path, ROWS)
    run(PLAIN, out, file, "--sizes", "train=5", "test=5")
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    real, calls = pyarrow.parquet.write_table, []

    def full_disk(table: object, where: object) -> None:
        calls.append(where)
        if len(calls) == 2:
            raise OSError("no space left on device")
        real(table, where)

    monkeypatch.setattr(pyarrow.parquet, "write_table", full_disk)
    with pytest.raises(OSError, match="no space left"):
        run(PLAIN, out, file, "--sizes", "train=4", "test=4")
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before


def test_a_problem_has_one_hash_in_all_its_spellings() -> None:
    same = contamination.problem_hash("Find $x$ if $2x = 4$.")
    for other in (
        "find x if 2x=4.",
        "Find $x$\n if $2x  = 4$.",
        "Find $x$ if $2x = 4$. Please reason step by step, and put your final answer within \\boxed{}.",
        "Find $x$ if $2x = 4$. Let's think step by step and output the final answer within \\boxed{}.",
        "Find \\(x\\) if \\[\\text{ }2x = 4\\]",
        "Ｆind $x$ if $2x = 4$. Put your final answer within \\boxed{}.",
    ):
        assert contamination.problem_hash(other) == same
    assert contamination.problem_hash("Find $x$ if $2x = 5$.") != same
    half = contamination.problem_hash("What is $\\left(\\frac{1}{2}\\right)^2$?")
    assert contamination.problem_hash("What is $(\\dfrac{1}{2})^2$?") == half
    assert contamination.problem_hash("Add 2.5.") != contamination.problem_hash("Add 25.")


def test_the_same_problems_are_found_in_files_of_different_origin(real_data: Path) -> None:
    pairs = {
        ("math/math500.jsonl", "bupo/math500.parquet"): 500,
        ("competition/amc23.jsonl", "bupo/amc2023.parquet"): 40,
        ("competition/aime24.jsonl", "bupo/aime_2024.parquet"): 29,  # one problem is worded differently
        ("math/math500.jsonl", "math/train.parquet"): 0,
        ("gsm8k/train.jsonl", "gsm8k/test.jsonl"): 0,
    }
    for names, shared in pairs.items():
        first, second = (contamination.hashes(str(real_data / name)) for name in names)
        assert len(first & second) == shared, names
