"""Dialogues in plain text: an environment's text follows the policy's without roles or marks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.agents.messages import content
from jaxrl_llm.agents.outside import OutsideEncoder
from jaxrl_llm.data.tokenizer import stop_ids
from jaxrl_llm.experience import Action, Finish, Task

Messages = Sequence[Mapping[str, Any]]


class PlainText:
    """Extends a prompt's tokens by the text of the policy and of an environment, without a chat template.

    Args:
      tokenizer: a fast transformers tokenizer.

    Raises:
      ValueError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._outside = OutsideEncoder(tokenizer)
        self.stop_token_ids: tuple[int, ...] = tuple(stop_ids(tokenizer))

    def opening(self, task: Task, said: Messages) -> np.ndarray:
        """Returns the prompt's own ids, int32 [P], followed by those of the environment's first messages."""
        return np.concatenate([task.prompt.prefix, self.prompt(said)])

    def prompt(self, messages: Messages, tools: Messages = ()) -> np.ndarray:
        """Returns token ids int32 [P] of the messages' contents, one after the other.

        Raises:
          ValueError: the tokenizer cannot encode them, or there are tools, for which plain text has no place.
        """
        if tools:
            raise ValueError("plain text has no place for the schemas of tools: use a tokenizer with a chat template")
        return np.asarray(
            self._outside.text("".join(content(message.get("content")) for message in messages)), np.int32
        )

    def bridge(self, prior_ids: np.ndarray, finish: Finish, new_messages: Messages, tools: Messages = ()) -> np.ndarray:
        """Returns token ids int32 [P] of the next prompt: exactly `prior_ids`, and the new messages' contents."""
        del finish
        return np.concatenate([np.asarray(prior_ids, np.int32), self.prompt(new_messages, tools)])

    def parse(self, ids: np.ndarray, *, finish: Finish = "stop", tools: Messages | None = None) -> Action:
        """Decodes a completion's ids int32 [T] into an action of text, without special tokens."""
        del tools
        return Action(text=self.tokenizer.decode(ids, skip_special_tokens=True), finish=finish)
