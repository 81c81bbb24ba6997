"""Questions with a gold answer from any .jsonl, .json or .parquet file, folder or Hugging Face dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.files import FileRows
from jaxrl_llm.data.templates import Template, continued
from jaxrl_llm.experience import Prompt
from jaxrl_llm.rewards.answers import boxed


@dataclass(frozen=True, kw_only=True)
class Questions(FileRows):
    """Reads rows of a question and its answer, such as a competition's problems.

    Attributes:
      name: name of the source, and prefix of the prompts' ids "name/row".
      question: columns that may hold the question; the first one that a row has is used.
      context: column with a text that the question goes on from, such as SVAMP's Body; empty for none.
      answer: columns that may hold the gold answer; a list of answers is joined by ", ", so that all of them are required.
      gold_in_box: whether the answer column is a worked solution with the gold answer in its last \\boxed{}.
      category: columns that may hold the category, by which metrics are split.
      where: {column: text}; only rows whose columns contain these texts are used, such as those of one year.
    """

    name: str = "questions"
    split: str = "test"
    question: Sequence[str] = ("question", "problem", "Question", "Problem")
    context: str = ""
    answer: Sequence[str] = ("answer", "final_answer", "Answer")
    gold_in_box: bool = False
    category: Sequence[str] = ("subject", "level", "type")
    where: Mapping[str, str] = field(default_factory=dict)
    template: str | Template = "chat_boxed"

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: a row has no question or no answer, or no row has the texts of `where`; the message names the file.
        """
        chosen = [
            (place, row)
            for place, row in self.located(*self.where)
            if all(text in str(row[column]) for column, text in self.where.items())
        ]
        if not chosen:
            raise ValueError(f"{self.path}: no row has {dict(self.where)}: check Questions.where")
        return [
            Prompt(
                id=f"{self.name}/{number}",
                reference=self._gold(where, row),
                source=self.name,
                extra={"category": str(_first(row, self.category) or "")},
                **self.asked(self._question(where, row)),
            )
            for number, (where, row) in enumerate(chosen)
        ]

    def _question(self, where: str, row: Mapping[str, Any]) -> str:
        question = str(required(where, row, self.question, "Questions.question"))
        if not self.context:
            return question
        return continued(str(required(where, row, (self.context,), "Questions.context")), question)

    def _gold(self, where: str, row: Mapping[str, Any]) -> str:
        gold = text_of(required(where, row, self.answer, "Questions.answer"))
        if self.gold_in_box:
            found = boxed(gold)
            if found is None:
                raise ValueError(f"{where}: no \\boxed{{}} in the worked solution (got ...{gold[-60:]!r})")
            gold = found
        if not gold.strip():
            raise ValueError(f"{where}: the gold answer is empty: leave the row out")
        return gold.strip()


def required(where: str, row: Mapping[str, Any], columns: Sequence[str], field: str) -> Any:
    """Returns the first of `columns` that the row has; raises ValueError that names the binding `field`."""
    found = _first(row, columns)
    if found is None:
        raise ValueError(f"{where}: none of the columns {list(columns)}; the row has {sorted(row)}: set {field}")
    return found


def text_of(answer: Any) -> str:
    """Returns an answer as text: 27.0 becomes "27", lists are joined."""
    if isinstance(answer, list | tuple):
        return ", ".join(map(text_of, answer))
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    return next((row[c] for c in columns if row.get(c) is not None), None)
