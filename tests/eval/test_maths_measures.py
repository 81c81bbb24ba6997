"""Extraction of final answers, avg@k, pass@k, maj@k of records, and the classes format x answer."""

import json
from pathlib import Path

import numpy as np
import pytest
from records_of import answered

from jaxrl_llm import command_line
from jaxrl_llm.eval import answered as frame
from jaxrl_llm.eval.maths import AtK, FormatClasses, final_answer
from jaxrl_llm.eval.questions import Questions


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "1/2"),
        ("\\boxed{\\dfrac{ x }{2}}", "\\frac{x}{2}"),
        ("first \\boxed{1}, no: \\boxed{1,234.50}", "2469/2"),
        ("<answer> \\left(3, \\frac{\\pi}{2}\\right) </answer>", "(3,\\frac{\\pi}{2})"),
        ("steps\n#### 18", "18"),
        ("it costs 3 dollars and then 4.50", "9/2"),
        ("\\boxed{x^2}", "x^2"),
        ("\\boxed{1 \\frac{1}{4}}", "5/4"),
        ("\\boxed{\\text{Yes}}", "Yes"),
        ("no idea", None),
    ],
)
def test_final_answers_have_one_spelling(text, answer):
    assert final_answer(text) == answer


def test_at_k_is_the_mean_over_choices_of_k():
    right, wrong = ("gold", 1), ("a", 0)
    groups = [
        answered("p", sampled=[right, wrong, wrong, ("b", 0)]),
        answered("q", sampled=[right, right, wrong, (None, 0)]),
    ]
    found = AtK().measure(groups)
    assert set(found) == {"avg@4", "pass@1", "pass@2", "maj@2", "pass@4", "maj@4"}
    assert found["avg@4"].tolist() == [0.25, 0.5]
    # p: 3 of 6 pairs hold the right one, and each is a tie. q: all but {a, none}; {gold, a} twice is a tie.
    assert found["pass@2"] == pytest.approx([3 / 6, 5 / 6])
    assert found["maj@2"] == pytest.approx([3 / 6 / 2, (1 + 2 + 2 / 2) / 6])
    assert found["maj@4"].tolist() == [0.0, 1.0]


def test_invalid_grades_leave_the_samples_and_too_few_give_no_value():
    found = AtK(ks=(2,)).measure([answered("p", sampled=[("1", 1), ("2", 0), ("3", None), ("4", None)])])
    assert found["pass@2"].tolist() == [1.0] and found["avg@4"].tolist() == [0.5]
    found = AtK(ks=(3,)).measure([answered("p", sampled=[("1", 1), ("2", 0), ("3", None)])])
    assert np.isnan(found["pass@3"]).all() and frame.estimate(found["pass@3"]).n == 0


def test_without_extracted_answers_nobody_votes():
    one = answered("p", sampled=[("1", 1), ("2", 0)])
    for record in one.records:
        del record["answer"]
    assert set(AtK().measure([one])) == {"avg@2", "pass@1", "pass@2"}


def test_a_grade_between_right_and_wrong_is_refused():
    with pytest.raises(ValueError, match=r"1 and a wrong one 0 .got 0.5."):
        AtK().measure([answered("p", sampled=[("1", 0.5)])])


def test_ks_beyond_the_samples_are_refused():
    with pytest.raises(ValueError, match=r"more than 1 samples: set Evaluation.samples"):
        AtK(ks=(2,)).measure([answered("p", sampled=[("1", 1)])])


def test_classes_cross_format_and_answer(tmp_path):
    spaced, broken = "why </think> <answer> 2 </answer>", "why </think>\n<answer> 2 </answer>"
    texts = [(spaced, 1), (spaced, 0), (broken, 1), ("2", 1), ("3", 0), ("", 0), ("x", None)]
    groups = [answered(str(i), greedy=(text, score)) for i, (text, score) in enumerate(texts)]
    measure = FormatClasses(form="r1_zero")
    report = measure.report(groups, tmp_path, "model")
    assert report["total_examples"] == 6
    assert {n: c["count"] for n, c in report["category_breakdown"].items()} == {
        "category_1_format1_answer1": 1,
        "category_2_format1_answer0": 1,
        "category_3_format0_answer0": 2,
        "category_4_format0_answer1": 2,
    }
    assert report["category_breakdown"]["category_4_format0_answer1"]["percentage"] == pytest.approx(100 / 3)
    assert report["aggregate_metrics"] == pytest.approx({"answer_reward": 0.5, "format_reward": 2 / 6, "reward": 1 / 6})
    shares = {name: values.mean() for name, values in measure.measure(groups).items()}
    assert shares == pytest.approx({"format": 2 / 7, "format_lenient": 3 / 7})


def test_gold_answers_come_from_columns_lists_floats_and_boxes(tmp_path):
    rows = [
        {"Problem": "a?", "final_answer": ["1", 2.0]},
        {"question": "b?", "answer": 27.0, "subject": "Algebra"},
        {"question": "c?", "answer": 0.5},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = Questions(path=str(file), template="question_only").rows()
    assert [(p.text, p.reference) for p in prompts] == [("a?", "1, 2"), ("b?", "27"), ("c?", "0.5")]
    assert prompts[1].extra["category"] == "Algebra"
    file.write_text(json.dumps({"problem": "d?", "solution": "so \\boxed{1} or \\boxed{\\frac{1}{2}}"}))
    boxed = Questions(path=str(file), answer=("solution",), gold_in_box=True)
    assert [p.reference for p in boxed.rows()] == ["\\frac{1}{2}"]
    file.write_text(json.dumps({"problem": "d?", "solution": "so 1"}))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no .boxed"):
        boxed.rows()


def test_rows_are_chosen_by_what_their_columns_hold(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"problem": f"{year}?", "answer": "025", "url": f"wiki/{year}_AIME_I_Problems/1"} for year in (2022, 2023, 2022)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    chosen = Questions(path=str(file), where={"url": "2022_AIME", "answer": "025"}, template="question_only").rows()
    assert [(p.id, p.text) for p in chosen] == [("questions/0", "2022?"), ("questions/1", "2022?")]
    with pytest.raises(ValueError, match=r"no row has \{'url': '2021_AIME'\}: check Questions.where"):
        Questions(path=str(file), where={"url": "2021_AIME"}).rows()
    with pytest.raises(ValueError, match="no value in column 'year'"):
        Questions(path=str(file), where={"year": "2022"}).rows()


@pytest.mark.parametrize(
    ("file", "count"),
    [("aime24", 30), ("aime25", 30), ("amc23", 40), ("hmmt25", 30), ("brumo25", 30), ("../math/math500", 500)],
)
def test_real_sets_are_read_whole(real_data, file, count):
    prompts = Questions(path=str(real_data / "competition" / f"{file}.jsonl")).rows()
    assert len(prompts) == count and all(p.reference for p in prompts)
    if file in ("aime24", "aime25", "amc23"):
        assert all(p.reference.lstrip("-").isdigit() for p in prompts)


def test_svamp_asks_its_text_with_the_question(real_data):
    raw = [json.loads(line) for line in (real_data / "svamp" / "test.jsonl").read_text().splitlines()]
    file = Path(__file__).parents[2] / "gin" / "eval" / "svamp.gin"
    given = ["MODEL_PATH = 'model'", f"DATA_PATH = '{real_data / 'svamp' / 'test.jsonl'}'"]
    prompts = command_line.build([str(file)], given)[0].evaluation.data.rows()
    assert len(prompts) == 1000 and prompts[0].reference == "145"
    assert (
        prompts[0]
        .messages[-1]["content"]
        .startswith(
            "There are 87 oranges and 290 bananas in Philip's collection. If the bananas are organized into 2 groups and oranges are "
            "organized into 93 groups. How big is each group of bananas?\n"
        )
    )
    for prompt, row in zip(prompts, raw, strict=True):
        asked = prompt.messages[-1]["content"]
        assert asked.startswith(row["Body"].strip()) and row["Question"].strip() in asked
        assert float(prompt.reference) == row["Answer"]


def test_extraction_agrees_with_the_stored_predictions_of_real_samples(real_data):
    rows = [json.loads(line) for line in (real_data / "graders" / "qwen_math_cot_100.jsonl").read_text().splitlines()]
    pairs = [(final_answer(c), final_answer(f"\\boxed{{{p}}}")) for r in rows for c, p in zip(r["code"], r["pred"])]
    assert len(pairs) == 800
    assert np.mean([ours == theirs for ours, theirs in pairs]) >= 0.99  # the stored ones lost " p.m."
