"""Chat completions over the token service: messages are appended to the exact ids of earlier answers, and completions are parsed.

A request's parent is the session's answer that its messages continue. Messages that match keep the ids as they were sampled; the
messages after that are rendered as text from outside. Where nothing matches, the whole conversation is rendered.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxrl_llm.agents import messages as chat
from jaxrl_llm.agents.chat_request import ChatRequest, digest, said
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Call, Session
from jaxrl_llm.agents.wire import Answer, usage
from jaxrl_llm.experience import Action, Finish

T = TypeVar("T")


@runtime_checkable
class ChatRenderer(Protocol):
    """Converts messages to token ids and back, as `rendering.Rendering` does."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn of the policy."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which decodes single tokens."""
        ...

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Returns token ids int32 [P] of a whole conversation and the beginning of the policy's turn."""
        ...

    def bridge(
        self, prior_ids: np.ndarray, finish: Finish, new_messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray | None:  # fmt: skip
        """Returns token ids int32 [P] of the next prompt, which begins with `prior_ids`; None where history is to be rendered anew."""
        ...

    def parse(
        self, ids: np.ndarray, *, finish: Finish = "stop", tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Action:
        """Parses a completion's ids int32 [T] into an action."""
        ...


@dataclass(eq=False, kw_only=True)
class Transcript:
    """The conversations of a session, which give the parent of a request.

    Each message has a key that includes those of the messages before it. An answer's key is its call's own, so that every form in which
    an agent may send it back gives the same key.
    """

    _answers: dict[bytes, tuple[bytes, Call]] = field(default_factory=dict, init=False)

    def parent(self, asked: ChatRequest) -> tuple[Call | None, int, bytes]:
        """Returns the last answer that the messages contain, how many messages end with it, and the key of all messages."""
        key, found, count = digest(list(asked.tools)), None, 0
        for place, message in enumerate(asked.messages):
            key = digest(key, said(message))
            if message["role"] == "assistant" and key in self._answers:
                key, found = self._answers[key]
                count = place + 1
        return found, count, key

    def add(self, key: bytes, call: Call, action: Action, shown: str) -> None:
        """Records the answer to the messages of a key, in each form in which agents send it back.

        Args:
          key: the key of the request's messages.
          call: the answered call.
          action: the action parsed from the answer.
          shown: the text that the agent gets, without a stop string; some agents add that again.
        """
        own = digest(key, call.number)
        for text in {shown, action.text}:
            message = chat.of_action(replace(action, text=text))
            self._answers[digest(key, said(message))] = own, call
            self._answers[digest(key, said({**message, "reasoning_content": ""}))] = own, call


@dataclass(eq=False, kw_only=True)
class Chat:
    """Answers chat requests of sessions.

    Attributes:
      service: samples the answers.
      rendering: converts messages to ids and back; it runs in a thread of its own, so that long conversations do not block the event loop.
    """

    service: TokenService
    rendering: ChatRenderer

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rendering")
        self._transcripts: dict[str, Transcript] = {}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def forget(self, session: str) -> None:
        """Drops the recorded messages of the session with this id."""
        self._transcripts.pop(session, None)

    async def answer(self, session: Session, asked: ChatRequest) -> Answer:
        """Answers a request; raises as `TokenService.call` does, and ValueError where a message cannot be rendered."""
        transcript = self._transcripts.setdefault(session.id, Transcript())
        parent, count, key = transcript.parent(asked)
        ids, reason = await self._apart(lambda: self._prompt(parent, count, asked))
        wish = replace(
            asked.wish, fork=reason, stop_token_ids=(*asked.wish.stop_token_ids, *self.rendering.stop_token_ids)
        )
        call = await self.service.call(session, ids, wish)
        action, shown, logprobs = await self._apart(lambda: self._read(call, asked))
        transcript.add(key, call, action, shown)
        session.ignored.update(asked.ignored)
        return Answer(text=json.dumps(self._body(session, asked, call, action, shown, logprobs)), calls=(call,))

    async def _apart(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _prompt(self, parent: Call | None, count: int, asked: ChatRequest) -> tuple[np.ndarray, str]:
        """Returns the ids to be continued, and the reason why they do not continue the parent's, "" where they do."""
        if parent is None:
            return self.rendering.prompt(asked.messages, asked.tools), ""
        rest = asked.messages[count:]
        if not rest:  # the answer itself is to be continued
            return parent.tokens, ""
        ids = self.rendering.bridge(parent.tokens, parent.completion.finish, rest, asked.tools)
        if ids is None:
            return self.rendering.prompt(asked.messages, asked.tools), "thoughts"
        return ids, ""

    def _read(self, call: Call, asked: ChatRequest) -> tuple[Action, str, list[dict[str, Any]] | None]:
        """Returns a completion's action, its text up to a stop string, and its tokens with their log-probs where they are requested."""
        done = call.completion
        action = self.rendering.parse(done.tokens, finish=done.finish, tools=asked.tools)
        places = [place for stop in asked.wish.stop_strings if (place := action.text.find(stop)) >= 0]
        shown = action.text[: min(places)] if places and done.finish == "stop" else action.text
        if not asked.logprobs:
            return action, shown, None
        texts = [self.rendering.tokenizer.decode([token]) for token in done.tokens.tolist()]
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, logprob in zip(texts, done.logprobs.astype(np.float32).tolist(), strict=True)
        ]
        return action, shown, entries

    def _body(
        self, session: Session, asked: ChatRequest, call: Call, action: Action, shown: str, logprobs: list[dict[str, Any]] | None
    ) -> dict[str, Any]:  # fmt: skip
        done = call.completion
        calls = [
            {"id": f"call_{call.number}_{place}", "type": "function",
             "function": {"name": one.name, "arguments": json.dumps(dict(one.arguments or {}), ensure_ascii=False)}}
            for place, one in enumerate(one for one in action.calls if one.status == "ok")
        ]  # fmt: skip
        message: dict[str, Any] = {
            "role": "assistant",
            "content": shown if shown or not calls else None,
            "refusal": None,
        }
        if action.reasoning:
            message["reasoning_content"] = action.reasoning
        if calls:
            message["tool_calls"] = calls
        finish = "length" if done.finish != "stop" else "tool_calls" if calls else "stop"
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if logprobs is not None:
            choice["logprobs"] = {"content": logprobs, "refusal": None}
        body: dict[str, Any] = {
            "id": f"chatcmpl-{session.id}-{call.number}", "object": "chat.completion", "created": int(time.time()),
            "model": call.adapter or self.service.model, "choices": [choice], "usage": usage(len(call.prompt), len(done.tokens)),
        }  # fmt: skip
        if asked.echoed:
            choice["token_ids"], body["prompt_token_ids"] = done.tokens.tolist(), call.prompt.tolist()
        return body


def chunks(body: Mapping[str, Any], counted: bool) -> Iterator[dict[str, Any]]:
    """Yields a finished answer as the events of a stream: role, thoughts and text, each call, the end, and the token count where requested."""
    shared = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice, message = body["choices"][0], body["choices"][0]["message"]

    def chunk(delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return {**shared, "choices": [one]} | ({"usage": None} if counted else {})

    yield chunk({"role": "assistant", "content": ""})
    if message.get("reasoning_content"):
        yield chunk({"reasoning_content": message["reasoning_content"]})
    if message["content"] or choice["logprobs"]:
        yield chunk({"content": message["content"] or ""}, logprobs=choice["logprobs"])
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish_reason=choice["finish_reason"])
    if counted:
        yield {**shared, "choices": [], "usage": body["usage"]}
