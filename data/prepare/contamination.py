"""Finds problems that two data sets share, by a hash of the question; a reworded problem counts as a different one."""

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data import files

# Common requests after the problem, in which data sets of the same problems differ.
_REQUEST = re.compile(
    r"\s(?:(?:let's|please) (?:think|reason) step by step|put your final answer within)\b.*$", re.IGNORECASE | re.DOTALL
)

# LaTeX that only changes the layout, and the marks that sources set differently; a point between digits stays.
_LAYOUT = re.compile(
    r"\\(?:left|right|big|bigg|displaystyle|text|textbf|textit|mathrm|operatorname|quad|qquad)(?![a-z])"
)
_MARKS = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w+\-*/=<>^.]")


def problem_hash(question: str) -> str:
    """Hashes a problem independently of case, spaces, punctuation, LaTeX layout, Unicode form and closing request."""
    asked = _REQUEST.sub("", unicodedata.normalize("NFKC", question)).casefold()
    plain = _MARKS.sub("", _LAYOUT.sub("", asked).replace("dfrac", "frac").replace("tfrac", "frac"))
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def question_of(row: Mapping[str, Any]) -> str | None:
    """Returns the bare question of an evaluation set's row or of a row in verl's schema; None where there is none."""
    info = row.get("extra_info") or {}
    for found in (info.get("question"), info.get("raw_problem"), row.get("question"), row.get("problem")):
        if found:
            return str(found)
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        return str(prompt[-1]["content"])
    return prompt if isinstance(prompt, str) else None


def hashes(name: str) -> set[str]:
    """Returns the hashes of an evaluation set's questions.

    Args:
      name: "path" or "path@split", for `files.read`; the default split is "test".

    Raises:
      ValueError: a row has no question.
    """
    path, _, split = name.partition("@")
    found = set()
    for where, row in files.read(path, (), split=split or "test"):
        question = question_of(row)
        if question is None:
            raise ValueError(f"--against {name}: {where} has no question, problem or prompt (it has {sorted(row)})")
        found.add(problem_hash(question))
    return found
