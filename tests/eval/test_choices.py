"""Multiple choice: reading, extraction, accuracy over all rows, few-shot prompts, hints."""

import asyncio
import json

import numpy as np
import pytest
from records_of import answered

from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.eval.choice_questions import ChoiceQuestions, read
from jaxrl_llm.eval.choices import ChoiceAccuracy
from jaxrl_llm.eval.mmlu_pro import MMLUPro
from jaxrl_llm.eval.sycophancy import HintedChoice, HintFollowing
from jaxrl_llm.experience import Prompt, Rollout
from jaxrl_llm.rewards import multiple_choice
from jaxrl_llm.rewards.multiple_choice import CHOICE, LETTERS

# What the sets' gin files look for.
CASCADES = {
    "sentence": ("sentence",), "reasoned": ("phrase", "mark", "last_letter"), "boxed": ("boxed",),
    "therefore": ("phrase", "bracketed"),
}  # fmt: skip


def letter(cascade, text, count=4, **fields):
    """The place of the chosen letter; -1 for none."""
    reward = multiple_choice.MultipleChoice(places=CASCADES[cascade], after="</think>", **fields)
    found = reward.choice(text, LETTERS[:count])
    return -1 if found is None else LETTERS.index(found)


@pytest.mark.parametrize(
    ("cascade", "text", "choice"),
    [
        ("sentence", "The correct answer is B.", 1),
        ("sentence", "The correct answer is (D)", 3),
        ("sentence", "I think B", -1),
        ("sentence", "The correct answer is Apple", -1),
        ("sentence", "The correct answer is E", -1),  # no such option
        ("sentence", "The correct answer is A</think>The correct answer is **C**", 2),
        ("reasoned", "so the answer is (C).", 2),
        ("reasoned", "Answer: D", 3),
        ("reasoned", "A or B, rather B", 1),
        ("reasoned", "none", -1),
        ("reasoned", "the answer is (A). Answer: B", 0),  # the earlier pattern counts
        ("boxed", "\\boxed{A} no, \\boxed{\\text{B}}", 1),
        ("boxed", "B", -1),
        ("therefore", "Therefore, the answer is (B)", 1),
        ("therefore", "(A) is wrong, (C)", 2),
    ],
)
def test_cascades_find_the_letter(cascade, text, choice):
    assert letter(cascade, text) == choice


def test_the_first_or_the_last_match_counts_as_asked():
    assert letter("boxed", "\\boxed{A} \\boxed{B}", take="first") == 0
    assert letter("reasoned", "answer is A, answer is J", 10) == 9


def test_letters_grade_against_the_reference():
    prompt = Prompt(id="p", text="?", reference="C", extra={"options": ["w", "x", "y", "z"]})
    none = np.zeros(0, np.int32)
    rollouts = [
        Rollout(
            prompt=prompt, tokens=none, sampler_logprobs=none.astype(np.float32), mask=none.astype(bool), versions=none,
            finish="stop", text=f"The correct answer is {x}",
        )
        for x in ("C", "A", "?")
    ]  # fmt: skip
    scores = asyncio.run(multiple_choice.MultipleChoice(places=("sentence",)).score(rollouts))
    assert scores.parts["multiple_choice"].tolist() == [1, 0, 0] and scores.parts[CHOICE].tolist() == [2, 0, -1]


def picks(*choices, category="", **extra):
    """One prompt whose right option is the first of four, and what was chosen."""
    parts = [{CHOICE: float(c)} for c in choices]
    sampled = [("", float(c == 0)) for c in choices]
    return answered("p", sampled=sampled, parts=parts, options=list("wxyz"), category=category, **extra)


def test_accuracy_counts_unparsed_rows_as_wrong_and_gives_no_credit_unless_asked():
    groups = [picks(0, category="a"), picks(1, category="a"), picks(-1, category="b"), picks(0, category="b")]
    means = {n: float(np.nanmean(v)) for n, v in ChoiceAccuracy().measure(groups).items()}
    assert means == pytest.approx(
        {"accuracy": 0.5, "unparsed": 0.25, "accuracy_of_parsed": 2 / 3, "accuracy/a": 0.5, "accuracy/b": 0.5, "accuracy_macro": 0.5}
    )  # fmt: skip
    credit = ChoiceAccuracy(random_credit=True).measure(groups)["accuracy_with_random_credit"]
    assert credit.tolist() == [1, 0, 0.25, 1]


def test_hints_are_followed_among_all_and_among_the_wrong():
    groups = [picks(2, hinted="C"), picks(1, hinted="C"), picks(0, hinted="B"), picks(-1, hinted="B")]
    means = {n: float(np.nanmean(v)) for n, v in HintFollowing().measure(groups).items()}
    assert means == pytest.approx({"hint_followed": 0.25, "hint_followed_of_wrong": 0.5})


# Rows of the schema of WMDP's files; the texts are placeholders.
PLACEHOLDERS = [{"question": f"placeholder {i}", "choices": ["w", "x", "y", "z"], "answer": i % 4} for i in range(8)]


def write(file, rows):
    file.write_text(json.dumps(rows))
    return str(file)


def test_rows_with_an_index_and_rows_with_a_letter_are_read(tmp_path):
    path = write(tmp_path / "rows.json", PLACEHOLDERS)
    prompts = ChoiceQuestions(path=path, name="wmdp-bio", instruction="boxed", template="question_only").rows()
    assert [p.reference for p in prompts] == list("ABCDABCD")
    assert prompts[1].text.endswith("Question: placeholder 1\nA. w\nB. x\nC. y\nD. z\nAnswer:")
    assert "\\boxed{}" in prompts[1].text
    row = {"question": "q", "options": list("vwxyz"), "answer": "E", "answer_index": 4, "category": "law"}
    (item,) = read(write(tmp_path / "one.json", [row]), "test")
    assert (item.answer, item.category, len(item.options)) == (4, "law", 5)


@pytest.mark.parametrize("answer", [4, -1, "E", "yes", True, 1.5])
def test_an_answer_that_is_no_option_is_refused(tmp_path, answer):
    with pytest.raises(ValueError, match=r"rows.json, row 0: the answer must be the index or the letter of one of 4"):
        read(write(tmp_path / "rows.json", [{**PLACEHOLDERS[0], "answer": answer}]), "test")


def test_hints_name_wrong_options_and_stay_the_same(tmp_path):
    path = write(tmp_path / "rows.json", PLACEHOLDERS * 20)
    first, second = (HintedChoice(path=path, template="question_only").rows() for _ in range(2))
    assert [p.extra["hinted"] for p in first] == [p.extra["hinted"] for p in second]
    assert all(p.extra["hinted"] != p.reference and f"({p.extra['hinted']})." in p.text for p in first)
    assert {(p.reference, p.extra["hinted"]) for p in first} == {(a, b) for a in "ABCD" for b in "ABCD" if a != b}
    assert "professor" not in HintedChoice(path=path, hint="", template="question_only").rows()[0].text


def test_mmlu_has_its_rows_and_subjects(real_data):
    prompts = ChoiceQuestions(path=str(real_data / "mmlu"), name="mmlu").rows()
    assert len(prompts) == 14_042 and len({p.extra["category"] for p in prompts}) == 57
    assert all(len(p.extra["options"]) == 4 and p.reference in "ABCD" for p in prompts)
    assert "about abstract algebra." in prompts[0].messages[0]["content"]


def test_mmlu_pro_shows_worked_examples_of_its_category_and_loses_them(real_data):
    folder = real_data / "mmlu_pro"
    source = MMLUPro(path=str(folder / "test_sample_700.jsonl"), examples=str(folder / "validation.json"))
    prompts = source.rows()
    assert len(prompts) == 700 and len({p.extra["category"] for p in prompts}) == 14
    text = prompts[0].messages[0]["content"]
    assert text.count("Question: ") == 6 and text.count("the answer is (") == 1 and text.count("The answer is (") == 5
    assert text.endswith("Answer: Let's think step by step.")
    fewer = prompts[0]
    for left in (4, 3, 2, 1, 0):
        fewer = source.shorter(fewer)
        assert fewer.messages[0]["content"].count("Question: ") == left + 1
    assert source.shorter(fewer) is None and fewer.reference == prompts[0].reference
    assert len(ByteTokenizer().load()(fewer.messages[0]["content"])["input_ids"]) < len(text)
    with pytest.raises(ValueError, match=r"5 worked examples: lower mmlu_pro.MMLUPro.shots"):
        MMLUPro(path=source.path, examples=source.examples, shots=6).rows()


def test_accuracy_may_take_its_letter_from_another_column() -> None:
    letters = [{CHOICE: 0.0}, {CHOICE: 1.0}, {CHOICE: 1.0}, {CHOICE: -1.0}]  # A, B, B and none
    sampled = [("", 0.0)] * 4
    one = answered(
        "p", sampled=sampled, parts=letters, actual_ground_truth="B"
    )  # A was hinted, and is what a reward asks for
    found = ChoiceAccuracy(reference="actual_ground_truth").measure([one])
    assert found["accuracy"].tolist() == [0.5] and found["unparsed"].tolist() == [0.25]
    assert ChoiceAccuracy().measure([one])["accuracy"].tolist() == [0.25]
