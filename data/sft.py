"""Demonstrations for SFT from files: rows with a prompt and a response, or with chat messages that end with the assistant's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.files import FileRows
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class Demonstrations(FileRows):
    """Reads rows of demonstrations.

    Attributes:
      prompt: column of the question; unused where `messages` is set.
      response: column of the response; unused where `messages` is set.
      messages: column of chat messages ({"role", "content"}); the last one, the assistant's, is the response.
      label: column that marks a response as desirable, true or false (for KTO); empty for none.
    """

    prompt: str = "prompt"
    response: str = "response"
    messages: str = ""
    label: str = ""

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts with their responses.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: the data is malformed; the message names the file and the row.
        """
        columns = [self.messages] if self.messages else [self.prompt, self.response]
        columns += [self.label] if self.label else []
        asked = self._from_messages if self.messages else self._from_columns
        return [
            Prompt(id=f"sft/{self.split}/{number}", source="sft", extra=self._label(where, row), **asked(where, row))
            for number, (where, row) in enumerate(self.located(*columns))
        ]

    def _label(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if not self.label:
            return {}
        if row[self.label] not in (True, False):  # 1 and 0 pass too
            raise ValueError(f"{where}: column {self.label!r} must be true or false (got {row[self.label]!r})")
        return {"desirable": bool(row[self.label])}

    def _from_columns(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": str(row[self.response]), **self.asked(str(row[self.prompt]))}

    def _from_messages(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        turns = row[self.messages]
        good = isinstance(turns, list) and all(isinstance(t, dict) and {"role", "content"} <= set(t) for t in turns)
        if not good or len(turns) < 2 or turns[-1]["role"] != "assistant":
            raise ValueError(
                f"{where}: column {self.messages!r} must be a list of at least two messages with 'role' and 'content', "
                f"the last of role 'assistant' (got {str(turns)[:80]})"
            )
        return {"messages": turns[:-1], "response": turns[-1]["content"]}
