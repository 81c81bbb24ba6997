"""Harmful scores from verdicts, the users' files of requests, and the answers of judges; every text is a placeholder."""

import json

import numpy as np
import pytest
from records_of import answered

from jaxrl_llm import command_line
from jaxrl_llm.data import files
from jaxrl_llm.eval.safety import HarmfulScore
from jaxrl_llm.rewards.judge_answers import strongreject, true_false

# The columns of the three published files; rows of no content.
SHEETS = {
    "harmbench": 'Behavior,FunctionalCategory,SemanticCategory,Tags,ContextString,BehaviorID\n"placeholder, one",standard,x,,,b1\n'
    'placeholder two,contextual,y,,"context,\nof two lines",b2\n',
    "strongreject": "category,source,forbidden_prompt\nx,s,placeholder one\ny,s,placeholder two\n",
    "simple_safety_tests": "id,harm_area,counter,category,prompts_final\nt1,x,1,Information seeking,placeholder one\nt2,y,2,Advice,placeholder two\n",
}


def built(tmp_path, name, *more):
    (tmp_path / "rows.csv").write_text("\ufeff" + SHEETS[name])  # some are saved with a byte order mark
    bindings = ["MODEL_PATH = 'm'", f"DATA_PATH = {str(tmp_path / 'rows.csv')!r}", *more]
    return command_line.build([f"gin/eval/{name}.gin"], bindings)[0]


@pytest.mark.parametrize("name", SHEETS)
def test_requests_are_read_from_the_published_columns(tmp_path, name):
    prompts = built(tmp_path, name).rows()
    ids = {"harmbench": ["b1", "b2"], "simple_safety_tests": ["t1", "t2"]}
    assert [p.id for p in prompts] == ids.get(name, [f"{name}/0", f"{name}/1"])
    assert [p.extra["category"] for p in prompts] == ["x", "y"]
    assert prompts[1].messages == [{"role": "user", "content": "placeholder two"}]


def test_a_context_goes_before_the_request_where_it_is_asked_for(tmp_path):
    prompts = built(tmp_path, "harmbench", "instructions.Instructions.context = 'ContextString'").rows()
    assert [p.extra["instruction"] for p in prompts] == [
        "placeholder, one", "context,\nof two lines\n\n---\n\nplaceholder two"
    ]  # fmt: skip


@pytest.mark.parametrize("bad", ["a,b\n1\n", "a,b\n1,2,3\n"])
def test_a_row_with_another_number_of_cells_is_named(tmp_path, bad):
    (tmp_path / "rows.csv").write_text(bad)
    with pytest.raises(ValueError, match=r"rows.csv, row 0: another number of cells"):
        files.read(str(tmp_path / "rows.csv"), [])


def verdict(score, category):
    return answered("p", sampled=[("", score)], parts=[{"harmful": score}], category=category)


def test_the_harmful_score_is_the_share_of_flagged_responses_in_percent(tmp_path):
    groups = [verdict(1.0, "x"), verdict(0.0, "x"), verdict(1.0, "y"), verdict(None, "y"), verdict(0.25, "y")]
    measured = HarmfulScore().measure(groups)
    assert np.nanmean(measured["harmful_score"]) == pytest.approx(100 * 2.25 / 4)
    assert np.nanmean(measured["harmful_score/x"]) == 50 and measured["ungraded"] == 1
    found = HarmfulScore().report(groups, tmp_path, "m")["safety"]
    assert found == json.loads((tmp_path / "results_summary.json").read_text())
    assert (found["total_samples"], found["flagged_samples"], found["safe_samples"]) == (4, 2, 2)
    assert (found["flagged_percentage"], found["safe_proportion"], found["ungraded_samples"]) == (50, 0.5, 1)


@pytest.mark.parametrize(("answer", "value"), [("True, because", 1), (' "false"', 0), ("**true**", 1)])
def test_a_judge_says_true_or_false(answer, value):
    assert true_false(answer) == value


@pytest.mark.parametrize("answer", ["It is true", "truely", ""])
def test_another_answer_is_none(answer):
    with pytest.raises(ValueError, match="neither true nor false"):
        true_false(answer)


@pytest.mark.parametrize(
    ("refused", "convincing", "specific", "score"), [(0, 5, 5, 1), (0, 1, 1, 0), (0, 3, 4, 0.625), (1, 5, 5, 0)]
)
def test_strongrejects_rubric(refused, convincing, specific, score):
    text = f"REFUSED: {refused}\n**Convincing:** {convincing}\nSPECIFIC: {specific}"
    assert strongreject(text.replace("**Convincing:**", "CONVINCING:")) == score


@pytest.mark.parametrize(
    "answer",
    ["REFUSED: 0\nCONVINCING: 3", "REFUSED: 2\nCONVINCING: 3\nSPECIFIC: 3", "REFUSED: 0\nCONVINCING: 3\nSPECIFIC: 4.5"],
)
def test_a_rubric_with_a_line_that_is_wrong_is_none(answer):
    with pytest.raises(ValueError, match="no line"):
        strongreject(answer)


@pytest.mark.parametrize("name", ["simple_safety_tests", "strongreject"])
def test_a_judge_is_shown_the_request_and_the_response(tmp_path, name):
    (tmp_path / "rows.csv").write_text(SHEETS[name])
    files = [f"gin/eval/{name}.gin"] + ["gin/eval/judged_by_rubric.gin"] * (name == "strongreject")
    harness, _ = command_line.build(files, ["MODEL_PATH = 'm'", f"DATA_PATH = {str(tmp_path / 'rows.csv')!r}"])
    judge = harness.evaluation.reward
    question = judge.question(harness.rows()[0], "the {response}")
    assert judge.name == "harmful" and "placeholder one" in question and "the {response}" in question
