"""Marks a response's chain of thought and its output among its tokens, by the ids of the tags (Classmate-CoT).

    thought = tokens from the first opening tag (or the start) to the first closing tag after it, tags left out
    output  = tokens after that closing tag; none where the thought was never closed

Only the first pair of tags counts, as in the original: a second thought is part of the output. Unlike in the original, a
response without an end tag has no output and no thought to be judged (`Thought.closed`), whatever its length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.experience import Rollout

THOUGHT, OUTPUT = "thought", "output"


class Thought(NamedTuple):
    """The places of the first thought in a response.

    Attributes:
      start: first token of the thought.
      end: the token after its last one.
      output: first token of the output; the response's length where there is none.
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
        opening, closing = (tokenizer.encode(tag, add_special_tokens=False) for tag in (self.opening, self.closing))
        found = split(rollout.tokens, opening, closing, opened=self.opened)
        return {THOUGHT: within(rollout.tokens, found.start, found.end) & found.closed} | {
            OUTPUT: within(rollout.tokens, found.output, len(rollout.tokens))
        }


def split(tokens: Int[np.ndarray, " T"], opening: Sequence[int], closing: Sequence[int], *, opened: bool) -> Thought:
    """Finds the first thought; a tag may consist of several ids.

    Args:
      opened: whether the response begins inside the thought; an opening tag at its very start is skipped even so.
    """
    first = find(tokens, opening, 0) if opening else None
    if opened:
        start = len(opening) if first == 0 else 0
    else:
        start = 0 if first is None else first + len(opening)
    end = find(tokens, closing, start)
    begun = opened or first is not None
    if end is None:
        return Thought(start, len(tokens), len(tokens), False)
    return Thought(start, end, end + len(closing) if begun else len(tokens), begun)


def find(tokens: Int[np.ndarray, " T"], ids: Sequence[int], start: int) -> int | None:
    """Returns the first place at or after `start` where `ids` occur in a row; None where they do not."""
    wanted = np.asarray(ids)
    for i in range(start, len(tokens) - len(wanted) + 1):
        if tokens[i] == wanted[0] and np.array_equal(tokens[i : i + len(wanted)], wanted):
            return i
    return None


def within(tokens: Int[np.ndarray, " T"], start: int, end: int) -> Bool[np.ndarray, " T"]:
    """Returns True from `start` up to `end`, else False."""
    places = np.arange(len(tokens))
    return (places >= start) & (places < end)
