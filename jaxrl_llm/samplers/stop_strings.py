"""Where a stop string ends a response, in tokens: the text is decoded in a window, since a string may span tokens."""

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[list[int]], str]

# Tokens decoded before those that can hold the string: decoders treat the first token of a text in a way of its own.
_LEAD = 8
_BROKEN = "\ufffd"  # what decoders write for the first bytes of an unfinished character


def stop_length(
    tokens: np.ndarray, checked: int, strings: Sequence[str], min_tokens: int, decode: Decode
) -> int | None:
    """Fewest tokens whose text holds a stop string, or None.

    Args:
      tokens: int32 [T], the response so far.
      checked: how many of them were searched before.
      strings: the stop strings.
      min_tokens: a string counts only where it ends in this token or later.
      decode: token ids -> text.
    """
    old = max(checked, min_tokens - 1, 0)
    if old >= len(tokens):
        return None
    # A token holds a byte or more, so a string lies within as many tokens as it has bytes.
    start = max(0, old - max(len(s.encode()) for s in strings) - _LEAD)
    searched = len(decode(tokens[start:old].tolist()).rstrip(_BROKEN))

    def found(end: int) -> bool:
        text = decode(tokens[start:end].tolist())
        return any(text.find(s, max(0, searched - len(s) + 1)) >= 0 for s in strings)

    if not found(len(tokens)):
        return None
    return next(end for end in range(old + 1, len(tokens) + 1) if found(end))
