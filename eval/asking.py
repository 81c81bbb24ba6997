"""Ways to ask for several answers to one prompt: NoveltyBench's modes beside independent samples (arXiv 2504.05228).

Paraphrases     the k-th answer is to the k-th paraphrase of the prompt
InContext       the k-th answer follows the k - 1 before it, in one conversation
SystemMessage   every answer follows a system message
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxrl_llm.data import templates
from jaxrl_llm.experience import Prompt


@runtime_checkable
class Asking(Protocol):
    """The form in which each answer to a prompt is requested."""

    def form(self, prompt: Prompt, before: Sequence[str]) -> Prompt:
        """Returns the prompt that follows the answers in `before`; raises ValueError where the prompt cannot take this form."""
        ...


@dataclass(frozen=True, kw_only=True)
class Paraphrases(templates.Templated):
    """Asks each paraphrase once, in order; there must be at least as many as answers.

    Attributes:
      column: the rows' column that holds the list of paraphrases (`instructions.Instructions.keep` must name it).
    """

    column: str = "prompt_paraphrases"

    def form(self, prompt: Prompt, before: Sequence[str]) -> Prompt:
        """Returns the next paraphrase; raises ValueError where the row has none left."""
        texts = prompt.extra.get(self.column) or ()
        if len(before) >= len(texts):
            raise ValueError(
                f"prompt {prompt.id!r} has {len(texts)} texts in column {self.column!r}, and more answers are asked for: lower SAMPLES, or "
                "name the column in instructions.Instructions.keep and asking.Paraphrases.column"
            )
        return replace(prompt, tokens=None, **({"text": None, "messages": None} | self.asked(str(texts[len(before)]))))


@dataclass(frozen=True, kw_only=True)
class InContext:
    """Asks for one answer after another in one conversation.

    Attributes:
      request: the user's message after each answer.
    """

    request: str = "Can you generate a different answer?"

    def form(self, prompt: Prompt, before: Sequence[str]) -> Prompt:
        """Returns the conversation so far; raises ValueError where the prompt is a plain text."""
        messages = [dict(message) for message in _messages(prompt)]
        for answer in before:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": self.request}]
        return replace(prompt, tokens=None, messages=messages)


@dataclass(frozen=True, kw_only=True)
class SystemMessage:
    """Puts a system message before the prompt.

    Attributes:
      text: the system message's text.
    """

    text: str = (
        "You are a producer of unique answers, and you strive to tell each user a novel answer to their question."
    )

    def form(self, prompt: Prompt, before: Sequence[str]) -> Prompt:
        """Returns the prompt after the message; raises ValueError where the prompt is a plain text."""
        del before
        return replace(prompt, tokens=None, messages=[{"role": "system", "content": self.text}, *_messages(prompt)])


def _messages(prompt: Prompt) -> Sequence[dict[str, str]]:
    if prompt.messages is None:
        raise ValueError(
            f"prompt {prompt.id!r} is a text, which no message can precede or follow: set the dataset's `template` to 'chat'"
        )
    return [dict(message) for message in prompt.messages]
