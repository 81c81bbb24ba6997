"""Reads requests of OpenAI's chat completions: which fields are honoured, ignored by name, or refused."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.agents import messages as chat
from jaxrl_llm.agents.generate_route import drawn, limit, stop_ids, stops, whole
from jaxrl_llm.agents.service import Wish
from jaxrl_llm.agents.session import Session
from jaxrl_llm.agents.wire import BadRequest

_HONOURED = {
    "model", "messages", "tools", "tool_choice", "stop", "stop_token_ids", "max_tokens", "max_completion_tokens", "seed", "stream",
    "stream_options", "n", "logprobs", "top_logprobs", "return_token_ids", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias",
}  # fmt: skip
# Values by which a field requests nothing.
_NOTHING: dict[str, Sequence[Any]] = {
    "parallel_tool_calls": (True,), "response_format": ({"type": "text"},), "store": (False,), "modalities": (["text"],),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of chat completions.

    Attributes:
      messages: the messages, in the form of `messages.normalised`.
      tools: schemas of the tools that are rendered.
      wish: the request's own settings of sampling.
      stream: whether the answer is a stream of events.
      counted: whether the stream reports the number of tokens.
      logprobs: whether the answer has the log-prob of each token.
      echoed: whether the answer has token ids.
      ignored: names of fields that are not honoured.
    """

    messages: tuple[chat.Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    wish: Wish
    stream: bool
    counted: bool
    logprobs: bool
    echoed: bool
    ignored: tuple[str, ...]


def read(body: Mapping[str, Any], session: Session, adapter: str = "") -> ChatRequest:
    """Reads a request to the policy, or to the loaded adapters of that name.

    Raises:
      BadRequest: a field is wrong, or asks for several answers, for other tokens than the sampled ones, for images or audio.
    """
    if body.get("n") not in (None, 1):
        raise BadRequest(f"n is 1: a session has one answer a request (got {body['n']!r})", "n")
    if body.get("top_logprobs") not in (None, 0):
        raise BadRequest(
            f"top_logprobs is 0: sampled tokens alone have log-probs (got {body['top_logprobs']!r})", "top_logprobs"
        )
    for name in ("audio", "functions", "function_call", "prediction"):
        if body.get(name) is not None:
            raise BadRequest(f"{name} is not served", name)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest("messages is a list of at least one message", "messages")
    tools, choice = _tools(body), body.get("tool_choice")
    settings, ignored = drawn(body, session)
    ignored += [name for name in body.keys() - _HONOURED if body[name] not in (None, [], {}, *_NOTHING.get(name, ()))]
    if choice not in (None, "auto", "none"):
        ignored.append("tool_choice")
    most = limit(body, "max_completion_tokens")
    wish = Wish(
        max_tokens=limit(body, "max_tokens") if most is None else most, stop_strings=stops(body), stop_token_ids=stop_ids(body),
        seed=whole(body, "seed"), settings=settings, adapter=adapter,
    )  # fmt: skip
    options = body.get("stream_options")
    return ChatRequest(
        messages=tuple(_message(message, place) for place, message in enumerate(given)), tools=() if choice == "none" else tools,
        wish=wish, stream=bool(body.get("stream")), counted=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")), echoed=bool(body.get("return_token_ids")), ignored=tuple(sorted(ignored)),
    )  # fmt: skip


def _message(message: Any, place: int) -> chat.Message:
    try:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message is an object (got {message!r})")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise ValueError(f"tool_calls is a list of objects (got {calls!r})")
        return chat.normalised(message)
    except ValueError as error:
        raise BadRequest(f"messages[{place}]: {error}", f"messages[{place}]") from error


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = body.get("tools") or []
    good = isinstance(tools, list) and all(
        isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("function"), Mapping) for tool in tools
    )  # fmt: skip
    if not good:
        raise BadRequest(
            "tools is a list of objects of the type 'function', each with its schema as 'function'", "tools"
        )
    return tuple(tools)


def digest(*parts: Any) -> bytes:
    """Returns a digest of JSON-like values that does not depend on the order of keys or the spaces of JSON."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(
            part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode("utf-8", "surrogatepass")
        )
        found.update(b"\0")
    return found.digest()


def said(message: chat.Message) -> list[Any]:
    """Returns what identifies a message: its role, text, calls and thoughts; ids and unknown fields do not count.

    The policy's text counts without the white space around it, since agents strip that.
    """
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [
        [call["function"]["name"], _plain(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return [message["role"], text, calls, message.get("reasoning_content", "").strip()]


def _plain(arguments: Any) -> Any:
    return arguments.strip() if isinstance(arguments, str) else arguments
