"""Preference pairs: a prompt with a preferred and a rejected answer.

Three formats are read: whole dialogues in `chosen` and `rejected` (lists of messages, or transcripts with Human and Assistant turns);
answers beside a `prompt`; and answers beside `conversations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_llm.data import conversations, templates
from jaxrl_llm.data.files import FileRows
from jaxrl_llm.data.prepare import preparation
from jaxrl_llm.experience import Prompt

ASKED = ("conversations", "prompt", "instruction", "question")


class Pair(NamedTuple):
    """A row's content: the dialogue before both answers, ending with the user's message, and the two answers."""

    asked: conversations.Messages
    chosen: str
    rejected: str


def pair(row: preparation.Raw) -> Pair:
    """Returns the pair that a row holds.

    Raises:
      preparation.Drop: the row holds no pair; the message gives the reason in one word.
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
class Pairs(FileRows):
    """Reads pairs for DPO and related algorithms, in any of the three formats or as written by data/prepare/preference.py.

    Attributes:
      template: name of a prompt template (data/templates.py) or a function, for prompts of one message; "chat" keeps
        messages unchanged.
    """

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts, with the preferred answer as `response` and the other as extra["rejected"].

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: a row holds no pair; the message names the file and the row.
        """
        prompts = []
        for number, (where, row) in enumerate(self.located("chosen", "rejected")):
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
                    **self._fields(where, row, held.asked),
                )
            )
        return prompts

    def _fields(self, where: str, row: preparation.Raw, asked: conversations.Messages) -> dict[str, Any]:
        if (row.get("extra_info") or {}).get("rendered"):
            return {"text": asked[0]["content"]}
        return templates.rerendered(self.template, asked, f"{where}: Pairs")
