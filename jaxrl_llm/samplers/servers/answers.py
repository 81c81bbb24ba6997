"""Requests to a server of tokens, its answers, and the errors between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxrl_llm.publication.vllm_route import LEAVING


class ServerFault(ConnectionError):
    """Raised where a server failed; the message names it and the cause, and another server may be asked."""


class Unreached(ServerFault):
    """Raised where there is no connection, or it broke."""


class Leaving(ServerFault):
    """Raised where a server takes no more requests, and returns those in flight with the tokens that they have."""


class TooSlow(Unreached):
    """Raised where a server did not answer within its limit."""


class Refused(ValueError):
    """Raised where a server answered 4xx: the request or the server's set-up is wrong, and another server would not help.

    Attributes:
      status: HTTP status of the answer; 0 where there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def fault_of(what: str, status: int, text: str) -> Exception:
    """Returns the exception for an answer other than 200, by its status and text."""
    said = f"{what}: {text}"
    if 400 <= status < 500:
        return Refused(said, status)
    return Leaving(said) if status == 503 and text == LEAVING else ServerFault(said)


def set_aside(url: str, cause: str) -> ServerFault:
    """Returns the fault of a request to a server that was set aside, which names the cause once."""
    said = f"{url} was set aside: "
    return ServerFault(said + cause.removeprefix(said))


@dataclass(eq=False, kw_only=True)
class Piece:
    """The tokens that one request has drawn for one sample so far.

    Attributes:
      tokens: token ids.
      logprobs: log-prob of each token under the distribution it was drawn from, nats.
      versions: policy version that drew each token.
      finish: "stop", "length", "abort" (ended early by the server), or None while it is being drawn.
      routes: experts of the tokens from `Ask.routed` on, uint [T, L, k], or None.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "abort"] | None = None
    routes: np.ndarray | None = None

    def cut(self, suspect: int | None) -> int:
        """Ends a piece whose server failed, without tokens of a suspect version; returns the number of tokens kept."""
        kept = next((i for i, version in enumerate(self.versions) if version == suspect), len(self.tokens))
        if self.finish is None or kept < len(self.tokens):
            self.finish = "abort"
        del self.tokens[kept:], self.logprobs[kept:], self.versions[kept:]
        return kept

    def take(self, choice: Mapping[str, Any], ask: "Ask", vocabulary: int, version: int) -> None:
        """Adds a server's tokens: those of an answer to the request, or of one event of a stream.

        Args:
          choice: the sample in the form of one of the routes.
          ask: the request.
          vocabulary: token ids are below it.
          version: version of tokens for which the server gives none.

        Raises:
          ValueError: the sample does not fit the request. KeyError, TypeError or AttributeError: the choice is not a sample.
          ServerFault: the server ended the request for a reason of its own.
        """
        tokens, logprobs = choice.get("token_ids") or [], choice.get("logprobs") or {}
        if isinstance(logprobs, list):
            drawn = logprobs
        elif "content" in logprobs:
            drawn = [entry["logprob"] for entry in logprobs["content"] or ()]
        else:
            drawn = list(logprobs.get("token_logprobs") or ())
        if len(drawn) != len(tokens) or not all(isinstance(x, float | int) and x == x for x in drawn):
            raise ValueError(f"{len(tokens)} tokens with log-probs {drawn[:3]}... of {len(drawn)}")
        if len(self.tokens) + len(tokens) > ask.sampling["max_tokens"]:
            raise ValueError(f"more than the {ask.sampling['max_tokens']} tokens that were asked for")
        if not all(0 <= token < vocabulary for token in tokens):
            raise ValueError(f"token ids outside 0..{vocabulary - 1}")
        finish = choice.get("finish_reason")
        if finish not in (None, "stop", "length", "abort"):
            raise ServerFault(f"a server ended a request with {finish!r}")
        self.versions += _versions(choice.get("weight_versions"), len(tokens), version)
        self.tokens += tokens
        self.logprobs += drawn
        self.finish = finish


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request: n continuations of one token prefix.

    Attributes:
      tokens: the prefix.
      sampling: sampling parameters by vLLM's names; "n" and "max_tokens" are among them.
      stream: whether the tokens come as they are drawn.
      routed: number of first tokens whose experts are already recorded.
    """

    tokens: Sequence[int]
    sampling: Mapping[str, Any]
    stream: bool = False
    routed: int = 0

    @property
    def n(self) -> int:
        return int(self.sampling["n"])


def _versions(spans: Sequence[Mapping[str, Any]] | None, count: int, version: int) -> list[int]:
    """Returns the version of each of the last `count` tokens of a sample: the spans of a stream begin at its first token."""
    if not spans:
        return [version] * count
    found = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(found) < count:
        raise ValueError(f"spans of versions over {len(found)} tokens of {count}")
    return found[len(found) - count :]


def check_quantization(url: str, held: Sequence[Mapping[str, Any]], wanted: str) -> None:
    """Refuses a server that quantizes where that is not expected, or the reverse, since the limit of its canary would be wrong."""
    if all(bool(rank.get("quantized")) == bool(wanted) for rank in held):
        return
    if wanted:
        raise Refused(
            f"{url} holds weights as they are published, and vllm.VllmSampler.quantization is {wanted!r}: start it with --quantization {wanted}, "
            "or set VLLM_QUANTIZATION = ''"
        )
    raise Refused(
        f"{url} quantizes its weights, and vllm.VllmSampler.quantization is empty: start it without --quantization, or set VLLM_QUANTIZATION to "
        "what it is started with, such as 'fp8_per_channel'"
    )
