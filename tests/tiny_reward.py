"""A reward that an untrained policy earns in part, so that the tests of whole runs learn something."""

from jaxrl_llm.experience import Prompt


def early_letters(prompt: Prompt, text: str) -> float:
    """The share of a response's characters that come from the first half of the alphabet."""
    del prompt
    return sum(c in "abcde" for c in text) / max(len(text), 1)
