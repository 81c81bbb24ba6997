"""GSM8K (arXiv 2110.14168): grade-school word problems whose gold answer follows "#### " in the worked solution."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.data import files, templates
from jaxrl_llm.experience import Prompt

MARK = "#### "


@dataclass(frozen=True, kw_only=True)
class GSM8K:
    """Reads rows with columns `question` and `answer`; the worked solution is the demonstration.

    Attributes:
      path: a Hugging Face dataset id, or a local .jsonl, .json or .parquet file, or a folder of such files.
      split: "train" or "test" of a folder or dataset.
      subset: configuration of the Hugging Face dataset.
      template: name of a prompt template (data/templates.py), or a function question -> text or messages.
      limit: most rows; None for all.
    """

    path: str = "openai/gsm8k"
    split: str = "train"
    subset: str = "main"
    template: str | templates.Template = "chat_boxed"
    limit: int | None = None

    def __post_init__(self) -> None:
        templates.named(self.template, "GSM8K")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; the reference is the gold answer without thousands separators.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: the data is malformed; the message names the file and the row.
        """
        template = templates.named(self.template, "GSM8K")
        prompts = []
        found = files.read(self.path, ["question", "answer"], split=self.split, subset=self.subset, limit=self.limit)
        for number, (where, row) in enumerate(found):
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
                    **templates.fields(template, str(row["question"])),
                )
            )
        return prompts


def gold(solution: str) -> str:
    """Returns the text after the last mark, without commas; empty where there is no mark."""
    _, mark, answer = solution.rpartition(MARK)
    return answer.strip().replace(",", "") if mark else ""
