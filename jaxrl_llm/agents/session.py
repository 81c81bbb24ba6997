"""A session: the policy calls of one rollout as a tree of exact token prefixes, and the branches that are learned from.

A node of the tree is a call. Its parent is the call whose prompt and completion together are the longest exact prefix of its own
prompt. A path from a root to a leaf is a branch; a token that the policy sampled is learned from in the first branch that holds it. What
other adapters sampled, where a call names them, stays in the branches as what was said, and is learned from in none.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.experience import Branch, Completion, SamplingParams, Turn, seed_of

_MOST_LOGPROB = 1e-6  # a log-prob is at most 0, but for rounding
_SEAM = 2  # tokens at a prompt's end that the tokenizer may merge with text after it
_ENOUGH = 8  # sampled tokens from which on log-probs that are all 0.0 count as missing


class Ended(Exception):
    """Raised where a session takes no further calls.

    Attributes:
      limit: "closed", "max_calls" or "max_tokens".
    """

    def __init__(self, limit: str, text: str) -> None:
        super().__init__(text)
        self.limit = limit


class TooLong(ValueError):
    """Raised where a prompt leaves no room for a token within the session's length."""


class Untrainable(ValueError):
    """Raised where a sampler's tokens cannot be learned from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """An answered call of the sampler.

    Attributes:
      number: number in the order in which calls of the session began, from 0.
      prompt: the continued tokens, int32 [P].
      completion: the sampled completion.
      parent: number of the call that the prompt continues; None for the first of a conversation.
      served: the policy version that was served when the call began.
      adapter: name of the loaded adapters that sampled the completion; "" for the policy.
    """

    number: int
    prompt: np.ndarray
    completion: Completion
    parent: int | None
    served: int
    adapter: str = ""

    @property
    def length(self) -> int:
        """The number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of prompt and completion, int32 [P + T]."""
        return np.concatenate([self.prompt, self.completion.tokens]).astype(np.int32)

    def begins(self, ids: np.ndarray) -> bool:
        """Returns whether prompt and completion are the beginning of `ids`."""
        prompt = len(self.prompt)
        return (
            self.length <= len(ids)
            and np.array_equal(self.completion.tokens, ids[prompt : self.length])
            and np.array_equal(self.prompt, ids[:prompt])
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A call that has begun.

    Attributes:
      number: the call's number.
      prompt: the tokens to continue, int32 [P].
      parent: the call that it continues, or None.
      place: the call's number among those with this prompt.
      fork: why the call does not continue the end of a branch; "" where it does, and for the first call.
      adapter: name of the loaded adapters that it asks; "" for the policy.
    """

    number: int
    prompt: np.ndarray
    parent: Call | None
    place: int
    fork: str
    adapter: str


@dataclass(eq=False, kw_only=True)
class Session:
    """The calls of one rollout, with its limits.

    Attributes:
      id: names the session in addresses.
      key: the secret of its requests.
      settings: how tokens are drawn.
      seed: seed of all samples.
      max_length: most tokens of a call's prompt and completion together.
      max_tokens: most tokens sampled in all calls; calls at the same time may each take what was left when they began. None is no limit.
      max_calls: most calls; None is no limit.
      trained: whether the tokens are learned from, so that requests cannot change how they are drawn.
      ignored: numbers of requests' fields that were ignored, by name.
      counters: numbers of calls that were given up, of retries that got an earlier answer, and of forks by their reason.
    """

    id: str
    key: str = field(repr=False)
    settings: SamplingParams
    seed: int
    max_length: int
    max_tokens: int | None = None
    max_calls: int | None = None
    trained: bool = True
    ignored: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    on_close: Callable[["Session"], None] = field(default=lambda session: None, repr=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._places: dict[bytes, set[int]] = {}  # by prompt: numbers of the calls that have it
        self._in_flight: dict[int, Callable[[], object]] = {}  # by call number: the function that gives the call up
        self._next = 0

    # -- calls ---------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[Call, ...]:
        """All answered calls, in the order in which they began."""
        return tuple(self._calls[number] for number in sorted(self._calls))

    @property
    def sampled(self) -> int:
        """The number of tokens sampled so far."""
        return sum(len(call.completion.tokens) for call in self._calls.values())

    def begin(self, prompt: np.ndarray, fork: str = "", adapter: str = "") -> Asked:
        """Begins a call.

        Args:
          prompt: int32 [P].
          fork: the reason to be counted where the call does not continue the end of a branch; "" derives it from the tokens.
          adapter: name of the loaded adapters that it asks; "" for the policy.

        Raises:
          Ended: the session is closed, or a limit is reached.
          TooLong: the prompt leaves no room for a token.
        """
        if self.closed:
            raise Ended("closed", f"the session {self.id} is closed")
        if self.max_calls is not None and len(self._calls) + len(self._in_flight) >= self.max_calls:
            raise Ended("max_calls", f"the session has had its {self.max_calls} calls (max_calls)")
        if self.left() < 1:
            raise Ended("max_tokens", f"the session has sampled its {self.max_tokens} tokens (max_tokens)")
        if not 1 <= len(prompt) < self.max_length:
            raise TooLong(
                f"a prompt must be 1 to {self.max_length - 1} tokens, so that one can follow within the context of "
                f"{self.max_length} (got {len(prompt)})"
            )
        places = self._places.setdefault(_digest(prompt), set())
        parent = self._parent(prompt)
        reason = self._fork(prompt, parent, bool(places), fork)
        place = next(i for i in range(len(places) + 1) if i not in places)
        places.add(place)
        self._next += 1
        return Asked(number=self._next - 1, prompt=prompt, parent=parent, place=place, fork=reason, adapter=adapter)

    def left(self) -> int:
        """Returns the number of tokens that may still be sampled."""
        return 1 << 31 if self.max_tokens is None else self.max_tokens - self.sampled

    def draw_seed(self, asked: Asked, given: int | None = None) -> int:
        """Returns the seed of a call, from the session's seed, the prompt, and the call's number among equal prompts or the request's seed.

        It does not depend on the order of calls with other prompts, so a session whose parts run in parallel is reproducible.
        """
        last = (asked.place,) if given is None else (0, given % 2**63)
        return seed_of(self.seed, zlib.crc32(asked.prompt.tobytes()), *last)

    def running(self, asked: Asked, give_up: Callable[[], object]) -> None:
        """Records the function that gives a call up when the session is closed."""
        self._in_flight[asked.number] = give_up

    def finish(self, asked: Asked, completion: Completion, served: int) -> Call:
        """Adds the answer of a call to the tree."""
        self._in_flight.pop(asked.number, None)
        parent = None if asked.parent is None else asked.parent.number
        call = Call(
            number=asked.number, prompt=asked.prompt, completion=completion, parent=parent, served=served, adapter=asked.adapter
        )  # fmt: skip
        self._calls[call.number] = call
        if asked.adapter:
            self.counters["adapter_calls"] += 1
        if asked.fork:
            self.counters[f"fork/{asked.fork}"] += 1
        return call

    def give_up(self, asked: Asked) -> None:
        """Forgets a call that was not answered; the next one with its prompt samples the same tokens."""
        self._in_flight.pop(asked.number, None)
        self._places[_digest(asked.prompt)].discard(asked.place)
        self.counters["aborted"] += 1

    def drop(self, *calls: Call) -> None:
        """Removes answers that nobody read from the tree, except those that a later call continues."""
        continued = {call.parent for call in self._calls.values()}
        for call in calls:
            if call.number not in continued:
                self._calls.pop(call.number, None)

    def restore(self, *calls: Call) -> None:
        """Puts dropped answers back, which a retry has read after all."""
        self._calls |= {call.number: call for call in calls}

    def close(self) -> None:
        """Ends the session and the calls in flight; its branches stay."""
        if self.closed:
            return
        self.closed = True
        for give_up in list(self._in_flight.values()):
            give_up()
        self.on_close(self)

    def _parent(self, prompt: np.ndarray) -> Call | None:
        """Returns the call whose tokens are the longest exact prefix of the prompt; the last of equal ones."""
        longest_first = sorted(self._calls.values(), key=lambda call: (-call.length, -call.number))
        return next((call for call in longest_first if call.begins(prompt)), None)

    def _fork(self, prompt: np.ndarray, parent: Call | None, repeated: bool, given: str) -> str:
        """Returns why the call begins a branch where it does not continue the end of one."""
        children = parent is not None and any(call.parent == parent.number for call in self._calls.values())
        if not self._calls or (parent is not None and not children and not repeated):
            return ""
        if given or repeated:
            return given or "repeated"
        common, nearest = max(((shared(call.tokens, prompt), call) for call in self.calls), key=lambda pair: pair[0])
        if parent is None and common < len(self._path(nearest)[0].prompt) - _SEAM:
            return "prompt"
        if len(nearest.prompt) - _SEAM <= common < nearest.length:
            return "cut_off" if nearest.completion.finish == "length" else "answer"
        return "history"

    def _path(self, leaf: Call) -> list[Call]:
        """Returns the calls from a root to `leaf`."""
        path = [leaf]
        while (parent := path[0].parent) is not None:
            path.insert(0, self._calls[parent])
        return path

    # -- what is learned from ------------------------------------------------------------------------------------------

    def branches(self) -> tuple[Branch, ...]:
        """Returns all branches in the order of their last calls, without those of which loaded adapters alone sampled what no earlier
        branch has; () where the policy answered no call.

        Raises:
          Untrainable: a call's arrays differ in length, a log-prob is not finite or above 0, all of them are 0.0, or a version is negative.
        """
        calls = self.calls
        self._check(calls)
        parents, learned = {call.parent for call in calls}, set[int]()
        paths = (self._path(call) for call in calls if call.number not in parents)
        return tuple(self._branch(path, learned) for path in paths if any(_is_new(call, learned) for call in path))

    def _branch(self, path: list[Call], learned: set[int]) -> Branch:
        """Builds a branch, in which the tokens of calls in `learned` are masked out, and adds its calls to `learned`."""
        leaf, begin = path[-1], len(path[0].prompt)
        tokens = leaf.tokens
        logprobs, mask = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool)
        versions, turns, done = np.zeros(len(tokens), np.int32), [], 0
        for call in path:
            start, end = len(call.prompt), call.length
            versions[done:start] = max(call.served, 0)
            logprobs[start:end], versions[start:end] = call.completion.logprobs, call.completion.versions
            mask[start:end] = _is_new(call, learned)
            turns.append(Turn(start=start - begin, end=end - begin, call=call.number))
            done = end
        learned.update(call.number for call in path)
        return Branch(
            prefix=tokens[:begin], tokens=tokens[begin:], sampler_logprobs=logprobs[begin:], mask=mask[begin:],
            versions=versions[begin:], finish=leaf.completion.finish, turns=tuple(turns),
        )  # fmt: skip

    def _check(self, calls: tuple[Call, ...]) -> None:
        count, zeros = 0, True
        for call in calls:
            done, where = call.completion, f"call {call.number} of the session"
            lengths = {len(done.tokens), len(done.logprobs), len(done.versions)}
            if len(lengths) > 1:
                raise Untrainable(
                    f"{where} has tokens, log-probs and versions of different lengths ({sorted(lengths)})"
                )
            if not np.isfinite(done.logprobs).all() or (done.logprobs > _MOST_LOGPROB).any():
                raise Untrainable(
                    f"{where} has log-probs that are not finite or above 0, such as "
                    f"{float(np.max(np.where(np.isfinite(done.logprobs), done.logprobs, np.inf)))}"
                )
            if (done.versions < 0).any():
                raise Untrainable(f"{where} has tokens of no version (got {int(done.versions.min())})")
            count += len(done.tokens)
            zeros = zeros and not done.logprobs.any()
        if zeros and count >= _ENOUGH and self.settings.temperature > 0 and self.settings.top_k != 1:
            raise Untrainable(f"the log-probs of all {count} sampled tokens are 0.0: the sampler does not give them")

    def metrics(self) -> Mapping[str, float]:
        """Returns counts of the session: calls, tokens, branches, tokens in several branches, forks by reason, ignored fields."""
        duplicated, total, before = 0, 0, list[np.ndarray]()
        parents = {call.parent for call in self._calls.values()}
        for call in self.calls:
            if call.number not in parents:
                tokens = call.tokens
                duplicated += max((shared(other, tokens) for other in before), default=0)
                total += len(tokens)
                before.append(tokens)
        found = {
            "calls": len(self._calls), "sampled_tokens": self.sampled, "branches": len(before), "branch_tokens": total,
            "duplicated_tokens": duplicated,
        } | dict(self.counters) | {f"ignored/{name}": count for name, count in self.ignored.items()}  # fmt: skip
        return {name: float(value) for name, value in found.items()}


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _is_new(call: Call, learned: set[int]) -> bool:
    """Returns whether a call is to be learned from in a branch: the policy's own, and in no earlier branch."""
    return not call.adapter and call.number not in learned


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
