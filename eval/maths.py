"""Metrics for questions with one right answer: avg@k, unbiased pass@k, maj@k, and the classes of format and answer.

The classes are those of the CS336 alignment assignment, where an answer can be right outside the required form. Its form
<think> ... </think> <answer> ... </answer> needs exactly one space between the tags; any white space counts as lenient.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.eval.answered import Answered, Record, mean, value
from jaxrl_llm.eval.pass_at_k import maj_at_k, pass_at_k, powers_of_two
from jaxrl_llm.rewards import answers

# {form: (strict test, lenient test)}
FORMS = {
    "r1_zero": (r"(?s)(?=.*</think> <answer>).*</answer>", r"(?s).*</think>\s*<answer>.*</answer>"),
    "boxed": (r"(?s).*\\boxed\{", r"(?s).*\\boxed"),
}
CLASSES = (
    "category_1_format1_answer1",
    "category_2_format1_answer0",
    "category_3_format0_answer0",
    "category_4_format0_answer1",
)


def final_answer(text: str) -> str | None:
    """Returns the final answer of a response, normalised: boxed, tagged, after "####", or else its last number."""
    found = answers.boxed(text) or answers.tagged(text) or answers.marked(text, "####")
    if found is None:
        number = answers.last_number(text)
        return None if number is None else str(number)
    number = answers.only_number(found)
    return str(number) if number is not None and _bare(found) else normalised(found) or None


def normalised(expression: str) -> str:
    """Removes marks that leave an expression's value unchanged: white space, dollar signs, \\left, \\dfrac."""
    text = re.sub(r"\\(left|right|!|,|;|:|quad|qquad)(?![a-zA-Z])|[\s$]", "", expression)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\2", text)
    return text.rstrip(".")


@dataclass(frozen=True, kw_only=True)
class AtK:
    """Measures sampled answers: "avg@n" of all n, "pass@k" and "maj@k" for k of n; samples without a valid grade do not count.

    maj@k votes with the answers that `Evaluation.answer` extracts, and is left out without it.

    Attributes:
      ks: values of k; empty takes the powers of two below the number of samples, and that number.
      part: the reward's part that is 1 for a right answer; empty takes the total.
    """

    ks: Sequence[int] = ()
    part: str = ""

    def __post_init__(self) -> None:
        if any(k < 1 for k in self.ks):
            raise ValueError(f"maths.AtK.ks must be >= 1 (got {list(self.ks)})")

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns one value per prompt; NaN where fewer than k samples are valid."""
        groups = [_valid_records(one.of("sampled"), self.part) for one in answered]
        most = max((len(one.of("sampled")) for one in answered), default=0)
        votes = all("answer" in record for group in groups for record, _ in group)
        if not most:
            return {}
        if any(k > most for k in self.ks):
            raise ValueError(f"maths.AtK.ks {list(self.ks)} ask for more than {most} samples: set Evaluation.samples")
        found = {f"avg@{most}": [mean([good for _, good in group]) for group in groups]}
        for k in self.ks or powers_of_two(most):
            found[f"pass@{k}"] = [_pass(group, k) for group in groups]
            if k > 1 and votes:
                found[f"maj@{k}"] = [_maj(group, k) for group in groups]
        return {name: np.array(values, np.float64) for name, values in found.items()}


@dataclass(frozen=True, kw_only=True)
class FormatClasses:
    """Counts form x answer over the greedy responses, or the sampled ones where there are no greedy ones.

    Attributes:
      form: "boxed" (an answer in \\boxed{}) or "r1_zero" (reasoning and answer in their tags).
      part: the reward's part that is 1 for a right answer; empty takes the total.
    """

    form: str = "boxed"
    part: str = ""

    def __post_init__(self) -> None:
        components.one_of(self, FORMS, "form")

    def measure(self, answered: Sequence[Answered]) -> Mapping[str, np.ndarray]:
        """Returns the shares of responses that have the form, by the strict and by the lenient test."""
        found = {}
        for name, pattern in zip(("format", "format_lenient"), FORMS[self.form], strict=True):
            shares = [np.mean([bool(re.match(pattern, r["response"])) for r in one.main]) for one in answered]
            found[name] = np.array(shares, np.float64)
        return found

    def report(self, answered: Sequence[Answered], folder: Path, model: str) -> Mapping[str, Any]:
        """Returns total_examples, aggregate_metrics and category_breakdown; it writes no file."""
        del folder, model
        strict = FORMS[self.form][0]
        seen = [
            (int(bool(re.match(strict, r["response"]))), good)
            for one in answered
            for r, good in _valid_records(one.main, self.part)
        ]
        names = {(1, 1): CLASSES[0], (1, 0): CLASSES[1], (0, 0): CLASSES[2], (0, 1): CLASSES[3]}
        counts, n = Counter(names[form, good] for form, good in seen), max(len(seen), 1)
        return {
            "total_examples": len(seen),
            "aggregate_metrics": {
                "answer_reward": sum(good for _, good in seen) / n,
                "format_reward": sum(form for form, _ in seen) / n,
                "reward": sum(form * good for form, good in seen) / n,
            },
            "category_breakdown": {c: {"count": counts[c], "percentage": 100 * counts[c] / n} for c in CLASSES},
        }


def _valid_records(records: Sequence[Record], part: str) -> list[tuple[Record, int]]:
    """Returns (record, 1 or 0) of the validly graded records; raises ValueError for a grade that is neither right nor wrong."""
    graded = [(record, grade) for record in records if not math.isnan(grade := value(record, part))]
    for record, grade in graded:
        if grade not in (0, 1):
            raise ValueError(
                f"{record['id']}: a right answer is 1 and a wrong one 0 (got {grade}): name the measure's `part`"
            )
    return [(record, int(grade)) for record, grade in graded]


def _pass(group: Sequence[tuple[Record, int]], k: int) -> float:
    return pass_at_k(len(group), sum(good for _, good in group), k) if k <= len(group) else math.nan


def _maj(group: Sequence[tuple[Record, int]], k: int) -> float:
    if k > len(group):
        return math.nan
    return maj_at_k([record["answer"] for record, _ in group], [bool(good) for _, good in group], k)


def _bare(text: str) -> bool:
    """Returns whether the text is a number without anything that could change its meaning, such as a variable or a second number."""
    return not re.search(r"[a-zA-Z^_]", re.sub(r"\\[dt]?frac|\\text\{[^{}]*\}|\\(dollars|%|\$)", "", text))
