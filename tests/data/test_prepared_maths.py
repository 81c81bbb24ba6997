"""The maths data sets as prepared: published counts, gold answers by another route, selections as documented."""

import re
from itertools import permutations
from pathlib import Path

import pytest
from prepared_rows import asked, run, source, truths, written

from jaxrl_llm.data import files, templates
from jaxrl_llm.data.parquet_rows import ParquetRows
from jaxrl_llm.data.prepare import (
    competition_math,
    countdown,
    deepmath,
    deepscaler,
    gsm8k,
    hendrycks_math,
    math500,
    openmathreasoning,
    svamp,
)
from jaxrl_llm.rewards.countdown import Countdown


def test_gsm8k_has_its_published_sizes_and_numbers_as_gold_answers(real_data: Path, tmp_path: Path) -> None:
    counts = run(gsm8k.PREPARATION, tmp_path, real_data / "gsm8k")
    assert (counts["written/train"], counts["written/test"], counts["shared/test"]) == (7473, 1319, 0)
    rows = written(tmp_path, "test")
    golds = [re.search(r"#### (-?[\d.,]+)", row["extra_info"]["answer"]) for row in rows]
    assert truths(rows) == [gold[1].replace(",", "") for gold in golds if gold]
    assert {row["data_source"] for row in rows} == {"openai/gsm8k"}
    assert all(text.endswith(" Put your final answer within \\boxed{}.") for text in asked(rows))


def test_math_answers_are_those_that_another_preparation_found(real_data: Path, tmp_path: Path) -> None:
    raw, targets = [], []
    for _, row in files.read(str(real_data / "math" / "train.parquet"), ()):
        truth = row["reward_model"]["ground_truth"]
        problem = truth["question"].removesuffix(
            " Let's think step by step and output the final answer within \\boxed{}."
        )
        raw.append({"problem": problem, "solution": truth["solution"], "type": row["type"], "level": row["level"]})
        targets += [truth["target"]] * ("\\boxed{}" not in truth["solution"])
    counts = run(hendrycks_math.PREPARATION, tmp_path / "out", source(tmp_path, raw), "--splits", "train=train")
    rows = written(tmp_path / "out")
    assert (counts["written/train"], counts["dropped/no_boxed_answer"]) == (7498, 2)  # two box nothing
    assert len(targets) == 7498 and len({row["type"] for row in rows}) == 7
    same = sum(as_they_do(truth) == target for truth, target in zip(truths(rows), targets))
    assert same >= 0.97 * 7500
    numbers = [(truth, target) for truth, target in zip(truths(rows), targets) if re.fullmatch(r"-?\d+", truth)]
    assert len(numbers) > 4000 and all(truth == target for truth, target in numbers)


def test_math_is_read_from_a_file_with_verls_columns_as_from_its_own(real_data: Path, tmp_path: Path) -> None:
    file = real_data / "math" / "train.parquet"
    given = ("--splits", "train=train", "--limit", "100", "--instruction", "", "--solutions")
    run(hendrycks_math.PREPARATION, tmp_path / "out", file, *given)
    rows, truth = (
        written(tmp_path / "out"),
        [row["reward_model"]["ground_truth"] for _, row in files.read(str(file), ())],
    )
    assert len(rows) == 100 and rows[0]["response"].endswith("So $a+b=-3+3=\\boxed{0}$.\n</think> <answer>0</answer>")
    for row, raw, text in zip(rows, truth, asked(rows)):
        assert raw["question"] == text + " Let's think step by step and output the final answer within \\boxed{}."
        assert row["response"].startswith(raw["solution"].strip() + "\n</think> <answer>")
    bad = source(tmp_path, [{"question": "a?", "answer": "1"}])
    with pytest.raises(ValueError, match=r"no problem with its solution.*\['answer', 'question'\]"):
        run(hendrycks_math.PREPARATION, tmp_path / "bad", bad, "--splits", "train=train")


def test_svamp_asks_its_text_with_the_question(real_data: Path, tmp_path: Path) -> None:
    assert run(svamp.PREPARATION, tmp_path, real_data / "svamp" / "test.jsonl")["written/test"] == 1000
    rows, raw = written(tmp_path, "test"), [row for _, row in files.read(str(real_data / "svamp" / "test.jsonl"), ())]
    assert truths(rows) == [str(int(row["Answer"])) for row in raw]
    for text, row in zip(asked(rows), raw, strict=True):
        assert text.startswith(row["Body"].strip())
        assert text.endswith(f" {row['Question'].strip()} Put your final answer within \\boxed{{}}.")


def as_they_do(answer: str) -> str:
    """Without spaces and the commands of the answer's look, which the other preparation takes out of its targets."""
    short = re.sub(r"\\left|\\right|\\!|\\\$|\^\\circ|\\%|\s", "", answer.replace("dfrac", "frac"))
    short = re.sub(r"^\w=", "", short).replace("\\\\", "\\")
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", short)


def test_math_reads_its_subjects_folders_and_tests_on_the_first_rows_of_each(tmp_path: Path) -> None:
    for subject in hendrycks_math.SUBJECTS:
        (tmp_path / "raw" / subject).mkdir(parents=True)
        for split in ("train", "test"):
            problems = [
                {"problem": f"{subject} {split} {i}", "solution": f"So \\boxed{{{i}}}.", "type": subject}
                for i in range(3)
            ]
            source(tmp_path / "raw" / subject, [*problems, {"problem": "odd", "solution": "?", "type": subject}], split)
    counts = run(hendrycks_math.PREPARATION, tmp_path / "out", tmp_path / "raw", "--test_of_each", "2")
    assert (counts["written/train"], counts["written/test"], counts["dropped/no_boxed_answer"]) == (21, 14, 14)
    assert [row["extra_info"]["question"] for row in written(tmp_path / "out", "test")][:3] == [
        "algebra test 0",
        "algebra test 1",
        "counting_and_probability test 0",
    ]
    assert truths(written(tmp_path / "out", "test")) == ["0", "1"] * 7


def test_competition_math_leaves_out_what_is_tested(tmp_path: Path, real_data: Path) -> None:
    tested = str(real_data / "math" / "math500.jsonl")
    problems = [{"problem": row["problem"], "solution": row["solution"]} for _, row in files.read(tested, (), limit=40)]
    new = [{"problem": f"New problem {i}", "solution": f"\\boxed{{{i}}}"} for i in range(60)]
    sizes = ["--sizes", "test=20", "train=-1", "--against", tested]
    counts = run(competition_math.PREPARATION, tmp_path / "out", source(tmp_path, [*problems, *new]), *sizes)
    assert counts[f"dropped/contaminated by {tested}"] == 40
    assert (counts["written/test"], counts["written/train"]) == (20, 40)
    both = [row["extra_info"]["question"] for part in ("train", "test") for row in written(tmp_path / "out", part)]
    assert sorted(both) == sorted(row["problem"] for row in new)


def test_math500_has_500_problems_with_their_answers(real_data: Path, tmp_path: Path) -> None:
    counts = run(math500.PREPARATION, tmp_path, real_data / "math" / "math500.jsonl")
    assert counts["written/test"] == 500
    other = [row for _, row in files.read(str(real_data / "bupo" / "math500.parquet"), ())]
    assert truths(written(tmp_path, "test")) == truths(other)


def test_deepmath_has_the_rows_of_bupos_file(real_data: Path, tmp_path: Path) -> None:
    file = real_data / "deepmath" / "deepmath-5k.parquet"
    whole = ["--sizes", "train=-1", "--no-shuffle"]
    assert run(deepmath.PREPARATION, tmp_path, file, *whole)["written/train"] == 5000
    theirs = [row for _, row in files.read(str(file), ())]
    rows = written(tmp_path)
    assert [row["prompt"] for row in rows] == [
        [{"role": m["role"], "content": m["content"]} for m in row["prompt"]] for row in theirs
    ]
    assert truths(rows) == [row["reward_model"]["ground_truth"] for row in theirs]
    assert {row["data_source"] for row in rows} == {"math_dapo"} == {row["data_source"] for row in theirs}
    counts = run(deepmath.PREPARATION, tmp_path, file, *whole, "--no_guessable")
    assert counts["dropped/guessable_answer"] == 936


def omr(problem: str, rate: str | None, solution: str) -> dict[str, str | None]:
    return {
        "problem": problem,
        "pass_rate_72b_tir": rate,
        "generated_solution": solution,
        "expected_answer": "4",
    }


def test_openmathreasoning_keeps_the_easiest_solved_problems_in_r1_zeros_form(tmp_path: Path) -> None:
    done = "<think>\nink is thin</think>\n\nSo \\boxed{4}."
    rows = [
        omr("low", "0.1", done),
        omr("none", "n/a", done),
        omr("high", "0.9", done),
        omr("cut", "1.0", "<think>\nand so on"),
        omr("middle", "0.5", done),
        omr("null", None, done),
    ]
    sizes = ["--splits", "train=train", "--sizes", "train=1", "val=1"]
    counts = run(openmathreasoning.PREPARATION, tmp_path / "out", source(tmp_path, rows), *sizes)
    assert (counts["dropped/no_pass_rate"], counts["dropped/unfinished_thinking"], counts["unused"]) == (2, 1, 1)
    kept = [*written(tmp_path / "out"), *written(tmp_path / "out", "val")]
    assert {row["extra_info"]["question"] for row in kept} == {"high", "middle"}
    assert {row["response"] for row in kept} == {"ink is thin\n</think> <answer>So \\boxed{4}.</answer>"}
    assert asked(kept) == [templates.r1_zero(row["extra_info"]["question"]) for row in kept]
    with pytest.raises(ValueError, match=r"--sizes must name numbers of rows"):
        run(openmathreasoning.PREPARATION, tmp_path / "out", source(tmp_path, rows), "--sizes", "train=-1")


def test_deepscaler_drops_what_is_never_or_always_solved_and_repeats(tmp_path: Path) -> None:
    rows = [{"problem": f"Problem {i}", "answer": str(i), "solution": "s", "rate": i / 4} for i in range(5)]
    arguments = ["--sizes", "train=-1", "--pass_rate", "rate"]
    counts = run(deepscaler.PREPARATION, tmp_path / "out", source(tmp_path, [*rows, rows[2]]), *arguments)
    assert (counts["dropped/never_solved"], counts["dropped/always_solved"], counts["dropped/duplicate"]) == (1, 1, 1)
    kept = written(tmp_path / "out")
    assert sorted(truths(kept)) == ["1", "2", "3"] and all(templates.STEP_BY_STEP in text for text in asked(kept))


def reachable(numbers: tuple[int, ...]) -> set[float]:
    """All values of expressions over the numbers, each used once."""
    if len(numbers) == 1:
        return {float(numbers[0])}
    found = set()
    for order in set(permutations(numbers)):
        for cut in range(1, len(order)):
            for a in reachable(order[:cut]):
                for b in reachable(order[cut:]):
                    found |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return found


def test_generated_countdown_problems_can_be_solved(tmp_path: Path) -> None:
    arguments = ["--sizes", "train=30", "test=10"]
    counts = run(countdown.PREPARATION, tmp_path, Path("generated"), *arguments)
    assert (counts["written/train"], counts["written/test"], counts["shared/test"]) == (30, 10, 0)
    small = [t for t in truths(written(tmp_path)) if len(t["numbers"]) == 3]
    assert len(small) >= 5 and {len(t["numbers"]) for t in truths(written(tmp_path))} == {3, 4}
    for truth in small:
        assert any(abs(value - truth["target"]) < 1e-9 for value in reachable(tuple(truth["numbers"])))


def test_countdown_rows_of_a_file_keep_target_and_numbers(tmp_path: Path) -> None:
    file = source(tmp_path, [{"target": 24, "nums": [4, 6, 1]}])
    run(countdown.PREPARATION, tmp_path / "out", file, "--sizes", "train=1")
    (row,) = written(tmp_path / "out")
    assert row["reward_model"]["ground_truth"] == {"numbers": [4, 6, 1], "target": 24}
    assert "4, 6, 1" in asked([row])[0] and "equals 24" in asked([row])[0]
    (prompt,) = ParquetRows(path=str(tmp_path / "out"), reference="").rows()  # as a run reads it
    answers = ("<answer>4 * 6 * 1</answer>", "<answer>4 * 6</answer>", "24")
    assert [Countdown().judge(prompt, answer) for answer in answers] == [1.0, 0.1, 0.0]
