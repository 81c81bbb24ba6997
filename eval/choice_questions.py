"""Multiple choice questions from MMLU's CSV files, or from rows with question, choices and answer.

MMLU (arXiv 2009.03300) consists of files split/SUBJECT_split.csv without a header: question, A, B, C, D, answer. WMDP (arXiv
2403.03218) and others consist of rows {question, choices or options, answer: index or letter, subject or category}.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data import files
from jaxrl_llm.eval.choices import LETTERS
from jaxrl_llm.eval.questions import required
from jaxrl_llm.experience import Prompt

# Instructions by name; {subject} is the row's category in words.
INSTRUCTIONS: Mapping[str, str] = {
    "sentence": (
        "Answer the following multiple choice question about {subject}. Reply with one sentence of the form "
        '"The correct answer is _", the blank filled with the letter of the correct answer.'
    ),
    "boxed": (
        "Answer the following multiple choice question. Reason step by step, then give the letter of the correct answer "
        "in \\boxed{{}}."
    ),
}


@dataclass(kw_only=True)
class Item:
    """A question, the texts of its options, the index of the right option (from 0), and its subject or ""."""

    question: str
    options: Sequence[str]
    answer: int
    category: str = ""


@dataclass(frozen=True, kw_only=True)
class ChoiceQuestions(files.FileRows):
    """Asks multiple-choice questions zero-shot.

    Attributes:
      path: a folder of MMLU's CSV files, a file, a folder of files, or a Hugging Face dataset id.
      name: name of the source, and prefix of the prompts' ids "name/row".
      instruction: a name of INSTRUCTIONS ("sentence", "boxed"), or the text itself, in which {subject} stands for the category.
    """

    name: str = "choices"
    split: str = "test"
    instruction: str = "sentence"

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; the reference is the right letter.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: a row is bad; the message names the file and the row.
        """
        asked = INSTRUCTIONS.get(self.instruction, self.instruction)
        prompts = []
        for number, item in enumerate(read(self.path, self.split, self.subset, self.limit)):
            subject = item.category.replace("_", " ") or "general knowledge"
            body = f"{asked.format(subject=subject)}\n\nQuestion: {item.question}\n{lettered(item.options)}\nAnswer:"
            prompts.append(as_prompt(f"{self.name}/{number}", self.name, item, self.asked(body)))
        return prompts


def as_prompt(name: str, source: str, item: Item, fields: Mapping[str, Any]) -> Prompt:
    """Returns a prompt whose reference is the letter of the right option."""
    extra = {"options": list(item.options), "category": item.category, "question": item.question}
    return Prompt(id=name, reference=LETTERS[item.answer], source=source, extra=extra, **fields)


def lettered(options: Sequence[str], style: str = "{letter}. {option}") -> str:
    """Formats the options, one per line, each with its letter."""
    return "\n".join(style.format(letter=letter, option=option) for letter, option in zip(LETTERS, options))


def read(path: str, split: str, subset: str | None = None, limit: int | None = None) -> list[Item]:
    """Reads the items of MMLU's CSV files or of rows.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      ValueError: a row is bad, or there are none; the message names the file and the row.
    """
    folder = Path(path).expanduser() / split
    if folder.is_dir() and (sheets := sorted(folder.glob("*.csv"))):
        items = [item for sheet in sheets for item in _of_sheet(sheet, sheet.stem.removesuffix(f"_{split}"))]
        return items[:limit]
    return [_of_row(where, row) for where, row in files.read(path, [], split=split, subset=subset, limit=limit)]


def _of_sheet(sheet: Path, category: str) -> Iterator[Item]:
    with sheet.open(newline="", encoding="utf-8") as lines:
        for number, cells in enumerate(csv.reader(lines), start=1):
            where = f"{sheet}, row {number}"
            if len(cells) < 4:
                raise ValueError(
                    f"{where}: needs a question, its options and the answer's letter (got {len(cells)} cells)"
                )
            question, *options, answer = cells
            yield _item(where, question, options, answer.strip(), category)


def _of_row(where: str, row: Mapping[str, Any]) -> Item:
    options = required(where, row, ("choices", "options"), "the dataset's columns")
    answer = required(where, row, ("answer_index", "answer"), "the dataset's columns")
    category = row.get("subject") or row.get("category") or ""
    return _item(
        where, str(required(where, row, ("question",), "the dataset's columns")), options, answer, str(category)
    )


def _item(where: str, question: str, options: Sequence[Any], answer: Any, category: str) -> Item:
    index = LETTERS.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(options) <= len(LETTERS):
        raise ValueError(
            f"{where}: the answer must be the index or the letter of one of {len(options)} options (got {answer!r})"
        )
    return Item(question=question, options=[str(o) for o in options], answer=index, category=category)
