"""Requests: a call of `sample`, each sequence that it asks for, and the search for stop strings (NumPy alone).

The search decodes a window of tokens, since a stop string may span several.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.experience import Completion, Finish, SamplingParams
from jaxrl_llm.protocols import Conversation

Decode = Callable[[list[int]], str]


@runtime_checkable
class Recorded(Protocol):
    """The experts of the tokens of several prompts, uint [N, T, L, k]."""

    @property
    def host(self) -> np.ndarray: ...


# Tokens decoded before those that can hold the string, since decoders treat the first token of a text differently.
_LEAD = 8
_BROKEN = "\ufffd"  # what decoders write for the first bytes of an unfinished character


def stop_length(
    tokens: np.ndarray, checked: int, strings: Sequence[str], min_tokens: int, decode: Decode
) -> int | None:
    """Returns the fewest tokens whose text holds a stop string, or None.

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


@dataclass(eq=False, kw_only=True)
class Request:
    """One call of `sample`.

    Attributes:
      prefixes: int32 [T] each.
      n: completions of each prefix.
      settings: how tokens are drawn.
      seeds: one for each prefix.
      max_length: most tokens of a prefix and its completion together.
      version: the oldest policy version that may answer, where several are served at a time.
      conversation: the conversation of which the prefixes are turns, or None.
      place: the place of the adapters that draw, where a sampler serves several sets.
      open: False once nobody waits for the result.
      groups: finished groups, or the error that ended the engine.
    """

    prefixes: Sequence[np.ndarray]
    n: int
    settings: SamplingParams
    seeds: Sequence[int]
    max_length: int
    version: int = -1
    conversation: Conversation | None = None
    place: int = 0
    open: bool = True
    groups: asyncio.Queue = field(default_factory=asyncio.Queue)
    _finished: dict[int, dict[int, Completion]] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return len(self.prefixes) * self.n

    @property
    def at_once(self) -> int:
        """The number of sequences to make room for, those of other conversations included."""
        return max(self.sequences, self.conversation.at_once if self.conversation else 0)

    @cached_property
    def length(self) -> int:
        """The number of tokens of the longest prefix and completion to come, later turns of the conversation included."""
        later = min(self.conversation.length, self.max_length) if self.conversation else 0
        return max(later, *(len(prefix) + self.limit(index) for index, prefix in enumerate(self.prefixes)))

    def limit(self, index: int) -> int:
        """Returns the most tokens of a completion of prefix `index`."""
        return min(self.settings.max_tokens, self.max_length - len(self.prefixes[index]))

    def drafts(self, index: int) -> list["Draft"]:
        """Returns the n sequences of prefix `index`, still empty."""
        return [Draft(request=self, index=index, sample=sample) for sample in range(self.n)]

    def finish(self, draft: "Draft", finish: Finish) -> None:
        """Records a finished sequence; delivers its group when that is complete."""
        group = self._finished.setdefault(draft.index, {})
        group[draft.sample] = draft.completion(finish)
        if len(group) == self.n:
            self.groups.put_nowait((draft.index, [group[sample] for sample in range(self.n)]))
            del self._finished[draft.index]


@dataclass(eq=False, kw_only=True)
class Draft:
    """A completion that is being sampled.

    Attributes:
      request: the call that asked for it.
      index: which of the call's prefixes it continues.
      sample: its number among the n of its prefix.
      count: tokens so far.
      recorded: the experts of prompts' tokens, and this prompt's row in them, where they are recorded.
    """

    request: Request
    index: int
    sample: int
    count: int = 0
    recorded: tuple[Recorded, int] | None = None

    def __post_init__(self) -> None:
        limit = self.request.limit(self.index)
        self._tokens, self._versions = np.empty(limit, np.int32), np.empty(limit, np.int32)
        self._logprobs = np.empty(limit, np.float32)
        self._routes: list[np.ndarray] = []

    @property
    def prefix(self) -> np.ndarray:
        return self.request.prefixes[self.index]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens so far, int32 [T]."""
        return self._tokens[: self.count]

    @property
    def version(self) -> int | None:
        """The version of all tokens so far; None where there are none, or they are of several versions."""
        found = set(self._versions[: self.count].tolist())
        return found.pop() if len(found) == 1 else None

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, version: int | np.ndarray, decode: Decode) -> bool:
        """Appends drawn tokens [T], all of one version or each of its own; returns whether a stop string ended the response, whose
        later tokens are dropped."""
        checked, self.count = self.count, self.count + len(tokens)
        self._tokens[checked : self.count] = tokens
        self._logprobs[checked : self.count] = logprobs
        self._versions[checked : self.count] = version
        settings = self.request.settings
        if not settings.stop_strings:
            return False
        stop = stop_length(self._tokens[: self.count], checked, settings.stop_strings, settings.min_tokens, decode)
        self.count = self.count if stop is None else stop
        return stop is not None

    def record(self, routes: np.ndarray) -> None:
        """Appends the experts of the next tokens that the model read, uint [T, L, k]: of the prefix, except those in `recorded`, then
        of the tokens drawn."""
        self._routes.append(routes)

    @property
    def routed(self) -> int:
        """The number of tokens whose experts `record` has got."""
        return sum(map(len, self._routes))

    def routes(self) -> np.ndarray | None:
        """Returns the experts of the tokens that the model read, uint [at most P + count - 1, L, k], or None."""
        parts = list(self._routes)
        if self.recorded is not None:
            prompts, row = self.recorded
            parts.insert(0, prompts.host[row, : len(self.prefix) - 1])
        return np.concatenate(parts)[: len(self.prefix) + self.count - 1] if parts else None

    def ended_by_id(self) -> bool:
        """Returns whether the last token is a stop id that counts."""
        settings = self.request.settings
        return (
            self.count >= max(settings.min_tokens, 1) and int(self._tokens[self.count - 1]) in settings.stop_token_ids
        )

    def completion(self, finish: Finish) -> Completion:
        kept = slice(self.count)
        return Completion(
            tokens=self._tokens[kept].copy(),
            logprobs=self._logprobs[kept].copy(),
            versions=self._versions[kept].copy(),
            finish=finish,
            routes=self.routes(),
        )


def check(request: Request, vocabulary: int, tokenizer: object) -> None:
    """Raises ValueError where a request cannot be served: its adapter, n, seeds, stop strings, or a prefix."""
    if request.n < 1:
        raise ValueError(f"n must be >= 1 completions of each prefix (got {request.n})")
    seeds, settings = request.seeds, request.settings
    if settings.adapter and not request.place:
        raise ValueError(
            f"SamplingParams.adapter names adapters that embedded.EmbeddedSampler.loaded has room for, and this sampler loads none (got "
            f"{settings.adapter!r}): set it to ''"
        )
    if len(seeds) != len(request.prefixes) or not all(0 <= seed < 2**64 for seed in seeds):
        raise ValueError(
            f"sample needs one seed in [0, 2^64) for each prefix (got {len(seeds)} for {len(request.prefixes)}: {seeds})"
        )
    if settings.stop_strings and (tokenizer is None or not all(settings.stop_strings)):
        raise ValueError(f"stop_strings {settings.stop_strings} need a tokenizer, and no string may be empty")
    for index, prefix in enumerate(request.prefixes):
        if prefix.ndim != 1 or not np.issubdtype(prefix.dtype, np.integer) or not 1 <= len(prefix) < request.max_length:
            raise ValueError(
                f"prefix {index} must be 1 to {request.max_length - 1} token ids, max_length less one token to draw "
                f"(got {prefix.dtype} {prefix.shape}): drop or shorten the prompt, or raise max_length"
            )
        if prefix.min() < 0 or prefix.max() >= vocabulary:
            raise ValueError(
                f"prefix {index} holds token ids {prefix.min()}..{prefix.max()}, the policy knows 0.."
                f"{vocabulary - 1}: its tokenizer is another model's"
            )
