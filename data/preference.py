"""Preference pairs: a prompt, the answer that was preferred and the one that was not.

Three forms are read: whole dialogues in `chosen` and `rejected` (lists of messages, or transcripts with Human and Assistant turns);
answers beside a `prompt`; and answers beside `conversations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_llm.data import conversations, files, templates
from jaxrl_llm.data.prepare import preparation
from jaxrl_llm.experience import Prompt

ASKED = ("conversations", "prompt", "instruction", "question")


class Pair(NamedTuple):
    """A row's content: the dialogue that both answers answer, the user's message last, and the two answers."""

    asked: conversations.Messages
    chosen: str
    rejected: str


def pair(row: preparation.Raw) -> Pair:
    """The pair that a row holds.

    Raises:
      prepare.Drop: it holds none; the message says why in one word.
    """
    chosen, rejected = (conversations.messages(row[side], role="assistant") for side in ("chosen", "rejected"))
    if chosen is None or rejected is None or {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
        raise preparation.Drop("malformed")
    if len(chosen) == len(rejected) == 1:
        asked = next((conversations.messages(row[name]) for name in ASKED if row.get(name) is not None), None)
    else:
        asked = chosen[:-1]
        if rejected[:-1] != asked:
            raise preparation.Drop("different_prompts")
    if not asked or asked[-1]["role"] != "user":
        raise preparation.Drop("no_prompt")
    answers = chosen[-1]["content"], rejected[-1]["content"]
    if answers[0] == answers[1]:
        raise preparation.Drop("same_answers")
    if not all(answer.strip() for answer in answers):
        raise preparation.Drop("empty_answer")
    return Pair(asked=asked, chosen=answers[0], rejected=answers[1])


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs for DPO and its kin, from any of the three forms or from what the command above wrote.

    Attributes:
      path: a local .jsonl, .json or .parquet file, a folder of such, or a Hugging Face dataset id.
      split: part of a folder or dataset.
      subset: configuration of a Hugging Face dataset; None for its default.
      template: name of a prompt template (data/templates.py) or a function, for prompts of one message; "chat" keeps
        messages as they are.
      limit: most rows; None for all.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    template: str | templates.Template = "chat"
    limit: int | None = None

    def __post_init__(self) -> None:
        templates.named(self.template, "Pairs")

    def rows(self) -> Sequence[Prompt]:
        """All prompts, the preferred answer as `response` and the other as extra["rejected"].

        Raises:
          FileNotFoundError: nothing at `path`.
          ValueError: a row that holds no pair; names the file and the row.
        """
        columns = ("chosen", "rejected")
        found = files.read(self.path, columns, split=self.split, subset=self.subset, limit=self.limit)
        prompts = []
        for number, (where, row) in enumerate(found):
            try:
                held = pair(row)
            except preparation.Drop as drop:
                raise ValueError(
                    f"{where}: no preference pair ({drop}); python -m jaxrl_llm.data.prepare.preference --source {self.path} "
                    "--out DIR leaves such rows out and counts them"
                ) from drop
            prompts.append(
                Prompt(
                    id=f"pairs/{self.split}/{number}",
                    source=str(row.get("data_source") or "pairs"),
                    response=held.chosen,
                    extra={"rejected": held.rejected},
                    **self._asked(where, row, held.asked),
                )
            )
        return prompts

    def _asked(self, where: str, row: preparation.Raw, asked: conversations.Messages) -> dict[str, Any]:
        if (row.get("extra_info") or {}).get("rendered"):
            return {"text": asked[0]["content"]}
        return templates.rerendered(self.template, asked, f"{where}: Pairs")
