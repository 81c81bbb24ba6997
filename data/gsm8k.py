"""GSM8K (arXiv 2110.14168): grade-school word problems whose gold answer follows "#### " in the worked solution."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.data.files import FileRows
from jaxrl_llm.data.templates import Template
from jaxrl_llm.experience import Prompt

MARK = "#### "


@dataclass(frozen=True, kw_only=True)
class GSM8K(FileRows):
    """Reads rows with columns `question` and `answer`; the worked solution is the demonstration."""

    path: str = "openai/gsm8k"
    subset: str | None = "main"
    template: str | Template = "chat_boxed"

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; the reference is the gold answer without thousands separators.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: the data is malformed; the message names the file and the row.
        """
        prompts = []
        for number, (where, row) in enumerate(self.located("question", "answer"), start=self.skip):
            reference = gold(str(row["answer"]))
            if not reference:
                raise ValueError(
                    f"{where}: no gold answer after {MARK!r} in column 'answer' (got {str(row['answer'])[-60:]!r})"
                )
            prompts.append(
                Prompt(
                    id=f"gsm8k/{self.split}/{number}",
                    reference=reference,
                    response=str(row["answer"]),
                    source="gsm8k",
                    **self.asked(str(row["question"])),
                )
            )
        return prompts


def gold(solution: str) -> str:
    """Returns the text after the last mark, without commas; empty where there is no mark."""
    _, mark, answer = solution.rpartition(MARK)
    return answer.strip().replace(",", "") if mark else ""
