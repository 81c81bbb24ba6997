"""The generate route: token ids in, token ids out, as in vLLM's /inference/v1/generate, for any sampler."""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.agents.service import TokenService, Wish
from jaxrl_llm.agents.session import Call, Session
from jaxrl_llm.agents.wire import Answer, BadRequest, spans, usage
from jaxrl_llm.experience import SamplingParams

PATH = "/inference/v1/generate"
_LEAST = -9999.0  # stands for -inf and NaN, which JSON does not have
_MOST = 64  # most completions of a prompt

# Fields of a request that have no meaning here, or do not change what is sampled.
_ACCEPTED = {
    "model",
    "token_ids",
    "sampling_params",
    "request_id",
    "stream",
    "stream_options",
    "return_token_ids",
    "output_mode",
}
_IGNORED = {"cache_salt", "priority"}
# Sampling parameters that change how tokens are drawn: those of SamplingParams by their names, and others.
DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens")
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "ignore_eos": False, "bad_words": None,
              "allowed_token_ids": None, "structured_outputs": None}  # fmt: skip
_QUIET = {"logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind",
          "include_stop_str_in_output", "routed_experts_prompt_start"}  # fmt: skip
_HONOURED = {"max_tokens", "stop", "stop_token_ids", "seed", "n"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of the generate route.

    Attributes:
      tokens: the prompt, int32 [P].
      n: number of completions.
      wish: the request's other settings.
      stream: whether the answer is a stream of events.
      echoed: whether the answer has the prompt's ids.
      ignored: names of fields that are not honoured.
    """

    tokens: np.ndarray
    n: int
    wish: Wish
    stream: bool
    echoed: bool
    ignored: tuple[str, ...]


def read(body: Mapping[str, Any], session: Session, adapter: str = "", passed: frozenset[str] = frozenset()) -> Asked:
    """Reads a request.

    Args:
      body: the request's body.
      session: the session, whose limits bound the request.
      adapter: name of the loaded adapters that it asks; "" for the policy.
      passed: names of unknown sampling parameters that are accepted.

    Raises:
      BadRequest: a field is wrong or unknown.
    """
    for name in body.keys() - _ACCEPTED - _IGNORED:
        if body[name] is not None:
            raise BadRequest(f"{name!r} is not served here: ask with token_ids and sampling_params alone", name)
    if body.get("output_mode") not in (None, "tokens"):
        raise BadRequest(f"output_mode is 'tokens' (got {body['output_mode']!r})", "output_mode")
    tokens, given = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(tokens, list) or not tokens or not all(type(i) is int and 0 <= i < 1 << 31 for i in tokens):
        raise BadRequest("token_ids is a list of at least one token id", "token_ids")
    if not isinstance(given, Mapping):
        raise BadRequest("sampling_params is an object", "sampling_params")
    known = {*DRAWN, *_PENALTIES, *_QUIET, *_HONOURED, *passed}
    if unknown := sorted(name for name in given.keys() - known if given[name] is not None):
        raise BadRequest(
            f"sampling_params holds {', '.join(unknown)}, and may hold {', '.join(sorted(known))}", unknown[0]
        )
    n = 1 if given.get("n") is None else given["n"]
    if type(n) is not int or not 1 <= n <= _MOST:
        raise BadRequest(f"n is 1 to {_MOST} (got {n!r})", "n")
    settings, ignored = drawn(given, session)
    ignored += [name for name in _IGNORED if body.get(name) is not None]
    wish = Wish(
        max_tokens=limit(given, "max_tokens"), stop_strings=stops(given), stop_token_ids=stop_ids(given), seed=whole(given, "seed"),
        settings=settings, adapter=adapter,
    )  # fmt: skip
    echoed = bool(body.get("return_token_ids"))
    return Asked(
        tokens=np.asarray(tokens, np.int32), n=n, wish=wish, stream=bool(body.get("stream")), echoed=echoed, ignored=tuple(ignored)
    )  # fmt: skip


def drawn(given: Mapping[str, Any], session: Session) -> tuple[SamplingParams | None, list[str]]:
    """Returns the sampling parameters that a request sets, where its session allows that, and the names of fields that are ignored.

    Raises:
      BadRequest: a value is not valid for sampling.
    """
    own = session.settings
    asked = {name: given[name] for name in DRAWN if given.get(name) is not None}
    if asked.get("top_k") == -1:  # vLLM's value for all tokens
        asked["top_k"] = 0
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadRequest(f"{name} is a number (got {value!r})", name)
    other = [name for name, value in asked.items() if value != getattr(own, name)]
    ignored = [name for name, off in _PENALTIES.items() if given.get(name) not in (None, off, {}, [])]
    if session.trained:
        return None, other + ignored
    try:
        least = int(asked.pop("min_tokens", own.min_tokens))
        kept = {name: getattr(own, name) for name in DRAWN if name not in ("min_tokens", *asked)}
        settings = SamplingParams(max_tokens=max(own.max_tokens, least), min_tokens=least, **kept, **asked)
    except ValueError as error:
        raise BadRequest(str(error), next(iter(asked), None)) from error
    return settings, ignored


def whole(given: Mapping[str, Any], name: str) -> int | None:
    """Reads a whole number of a request, or None; raises BadRequest for anything else."""
    value = given.get(name)
    if value is not None and type(value) is not int:
        raise BadRequest(f"{name} is a whole number (got {value!r})", name)
    return value


def limit(given: Mapping[str, Any], name: str) -> int | None:
    """Reads a whole number of at least 1 of a request, or None; raises BadRequest for anything else."""
    value = whole(given, name)
    if value is not None and value < 1:
        raise BadRequest(f"{name} is at least 1 (got {value})", name)
    return value


def stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Reads the strings that end a completion: one, or a list of them."""
    value = given.get("stop")
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"stop is a text or a list of texts, none of them empty (got {value!r})", "stop")
    return tuple(found)


def stop_ids(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads the token ids that end a completion."""
    value = given.get("stop_token_ids") or []
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in value):
        raise BadRequest(f"stop_token_ids is a list of token ids (got {value!r})", "stop_token_ids")
    return tuple(value)


async def generate(service: TokenService, session: Session, asked: Asked) -> Answer:
    """Answers a request; raises as `TokenService.call` does."""
    work = [asyncio.ensure_future(service.call(session, asked.tokens, asked.wish)) for _ in range(asked.n)]
    try:
        calls = await asyncio.gather(*work)
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    session.ignored.update(asked.ignored)
    body = {
        "request_id": f"{session.id}-{calls[0].number}",
        "choices": [_choice(index, call, asked.wish.stop_token_ids) for index, call in enumerate(calls)],
        "usage": usage(len(asked.tokens), sum(len(call.completion.tokens) for call in calls)),
        "prompt_token_ids": asked.tokens.tolist() if asked.echoed else None,
        "output_mode": "tokens",
    }
    return Answer(text=json.dumps(body), calls=tuple(calls))


def _choice(index: int, call: Call, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    done = call.completion
    tokens = done.tokens.tolist()
    entries = [
        {
            "token": f"token_id:{token}",  # as vLLM up to 0.31 names it
            "token_id": token,  # and from 0.32 on
            "logprob": logprob if math.isfinite(logprob) else _LEAST,
            "rank": None,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(tokens, done.logprobs.astype(np.float32).tolist(), strict=True)
    ]
    by_id = done.finish == "stop" and bool(tokens) and tokens[-1] in stop_token_ids
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"content": entries},
        "finish_reason": "abort" if done.finish == "aborted" else done.finish,
        "stop_reason": tokens[-1] if by_id else None,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans(done),
    }


def chunks(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the answer as the events of a stream: one for each completion, and one with the count of tokens."""
    shared = {"request_id": body["request_id"], "output_mode": body["output_mode"]}
    for choice in body["choices"]:
        yield {**shared, "choices": [choice], "usage": None}
    yield {**shared, "choices": [], "usage": body["usage"]}
