"""Marks a response's chain of thought and its output among its tokens, by the text of the tags (Classmate-CoT).

    thought = text from the first opening tag (or the start) to the first closing tag after it, tags left out
    output  = text after that closing tag; none where the thought was never closed

A tokenizer may join a tag with what stands beside it (Qwen's has ".</" and ")</" as one token), so tags are found in the decoded
text. Of tokens that are tag in part, none belongs to the thought, and one with text behind the closing tag belongs to the output.

Only the first pair of tags counts, as in the original: a second thought is part of the output. Unlike in the original, a
response without an end tag has no output and no thought to be judged (`Thought.closed`), whatever its length.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.experience import Rollout

THOUGHT, OUTPUT = "thought", "output"
UNFINISHED = "\ufffd"  # what the bytes of a character decode to before its last one


class Thought(NamedTuple):
    """The places of the first thought in a text.

    Attributes:
      start: first character of the thought.
      end: the character after its last one.
      output: first character of the output; the text's length where there is none.
      closed: whether a closing tag follows an opening one (or the start, where the prompt opened the thought).
    """

    start: int
    end: int
    output: int
    closed: bool


@dataclass(frozen=True, kw_only=True)
class ThoughtSpan:
    """Marks the spans "thought" and "output" of every response.

    Attributes:
      opening: the tag that begins a thought.
      closing: the tag that ends it.
      opened: whether the prompt ends with the opening tag, so that a response begins inside its thought.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False

    def __post_init__(self) -> None:
        if not self.closing or not (self.opening or self.opened):
            raise ValueError(
                f"ThoughtSpan.opening and closing must be tags (got {self.opening!r} and {self.closing!r})"
            )

    def mark(self, rollout: Rollout, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Returns {"thought": bool [T], "output": bool [T]}; both are all False where the thought was never closed."""
        tokens = rollout.tokens
        count = len(tokens)
        found = split(decoded(tokens, tokenizer), self.opening, self.closing, opened=self.opened)
        if not found.closed:
            return {THOUGHT: np.zeros(count, bool), OUTPUT: np.zeros(count, bool)}

        def characters(first: int) -> int:
            return len(decoded(tokens[:first], tokenizer).rstrip(UNFINISHED))

        places = range(count + 1)
        start = bisect_left(places, found.start, key=characters) if found.start else 0
        end = bisect_right(places, found.end, lo=start, key=characters) - 1
        output = bisect_right(places, found.output, lo=max(end, 0), key=characters) - 1
        return {THOUGHT: within(tokens, start, end), OUTPUT: within(tokens, output, count)}


def decoded(tokens: Int[np.ndarray, " T"], tokenizer: Any) -> str:
    """Returns the text of tokens as it is, special ones and spaces included."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def split(text: str, opening: str, closing: str, *, opened: bool) -> Thought:
    """Finds the first thought.

    Args:
      opened: whether the response begins inside the thought; an opening tag at its very start is skipped even so.
    """
    first = text.find(opening) if opening else -1
    if opened:
        start = len(opening) if first == 0 else 0
    else:
        start = first + len(opening) if first >= 0 else 0
    end = text.find(closing, start)
    begun = opened or first >= 0
    if end < 0:
        return Thought(start, len(text), len(text), False)
    return Thought(start, end, end + len(closing) if begun else len(text), begun)


def within(tokens: Int[np.ndarray, " T"], start: int, end: int) -> Bool[np.ndarray, " T"]:
    """Returns True from `start` up to `end`, else False."""
    places = np.arange(len(tokens))
    return (places >= start) & (places < end)
