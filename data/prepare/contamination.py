"""Which problems two data sets share, by a hash of the question; a problem that was reworded is another one to it."""

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data import files

# What prompts commonly ask for after the problem; data sets of the same problems differ in it.
_REQUEST = re.compile(
    r"\s(?:(?:let's|please) (?:think|reason) step by step|put your final answer within)\b.*$", re.IGNORECASE | re.DOTALL
)

# LaTeX that changes the look alone, and the marks that sources set differently; a point between digits stays.
_LAYOUT = re.compile(
    r"\\(?:left|right|big|bigg|displaystyle|text|textbf|textit|mathrm|operatorname|quad|qquad)(?![a-z])"
)
_MARKS = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w+\-*/=<>^.]")


def problem_hash(question: str) -> str:
    """Names a problem whatever its case, spaces, punctuation, LaTeX layout, Unicode form and closing request are."""
    asked = _REQUEST.sub("", unicodedata.normalize("NFKC", question)).casefold()
    plain = _MARKS.sub("", _LAYOUT.sub("", asked).replace("dfrac", "frac").replace("tfrac", "frac"))
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def question_of(row: Mapping[str, Any]) -> str | None:
    """The bare question of an evaluation set's row or of a row in verl's schema; None where it has none."""
    info = row.get("extra_info") or {}
    for found in (info.get("question"), info.get("raw_problem"), row.get("question"), row.get("problem")):
        if found:
            return str(found)
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        return str(prompt[-1]["content"])
    return prompt if isinstance(prompt, str) else None


def hashes(name: str) -> set[str]:
    """Hashes of an evaluation set's questions.

    Args:
      name: "path" or "path@split", as `files.read` takes them; the split "test" is the default.

    Raises:
      ValueError: a row without a question.
    """
    path, _, split = name.partition("@")
    found = set()
    for where, row in files.read(path, (), split=split or "test"):
        question = question_of(row)
        if question is None:
            raise ValueError(f"--against {name}: {where} has no question, problem or prompt (it has {sorted(row)})")
        found.add(problem_hash(question))
    return found
