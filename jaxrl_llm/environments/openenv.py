"""Environments of OpenEnv: each rollout has a WebSocket to an OpenEnv server, with actions by its schema or tools by MCP actions."""

import asyncio
import json
import re
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxrl_llm import components
from jaxrl_llm.experience import Action, Observation, Prompt, Task, ToolCall

MOST_BYTES = 1 << 26  # most bytes of an answer
AGAIN_S = 0.5  # seconds between two requests to a server that has no room
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class Refused(RuntimeError):
    """The error that a server answered.

    Attributes:
      code: "EXECUTION_ERROR", "VALIDATION_ERROR", "CAPACITY_REACHED" and others of OpenEnv's.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Plays the environment that an OpenEnv server runs.

    An action is the JSON object of the policy's turn, plain or in a fence, or its text where the environment's schema needs one field
    alone. The policy is told where it does not fit the schema. The rewards of the steps are summed, and kept one by one in "rewards" of
    the rollout's info.

    Attributes:
      url: the server's address, such as "http://127.0.0.1:8000".
      tools: whether the policy plays by the environment's MCP tools; a turn without a call then ends the rollout.
      text: the field of observations that the policy is shown; empty shows all of them as JSON.
      columns: names of the row's columns that `reset` is given, beside "seed", which is derived from the prompt's id where there is no
        such column.
      tries: most failed steps (EXECUTION_ERROR) of a rollout, which the policy is told of; one more makes the rollout invalid.
      wait_s: most seconds of waiting for a server that has as many sessions as it takes.
    """

    url: str
    tools: bool = False
    text: str = ""
    columns: Sequence[str] = ()
    tries: int = 1
    wait_s: float = 50.0
    _schemas: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Mapping[str, Any]]]" = field(
        init=False, repr=False, compare=False, default_factory=weakref.WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            components.refuse(self, "url", "an address that begins with http:// or https://")
        components.at_least(self, 0, "tries", "wait_s")

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Episode | ToolEpisode":
        """Returns the environment of one rollout, which connects at its first use."""
        del sample, seed
        return ToolEpisode(self, prompt) if self.tools else Episode(self, prompt)

    async def schema(self) -> Mapping[str, Any]:
        """Returns the JSON schema of an action, requested once; raises aiohttp.ClientError where the server does not give it."""
        loop = asyncio.get_running_loop()
        known = self._schemas.get(loop)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = self._schemas[loop] = asyncio.ensure_future(self._asked_schema())
        return await asyncio.shield(known)

    async def _asked_schema(self) -> Mapping[str, Any]:
        async with aiohttp.ClientSession(raise_for_status=True) as http, http.get(f"{self.address}/schema") as answer:
            found: Mapping[str, Any] = (await answer.json())["action"]
            return found

    @property
    def address(self) -> str:
        """The server's address without a slash at its end."""
        return self.url.rstrip("/")


class Connection:
    """One session of a server. A task reads it all the time, so that the server's pings are answered while the policy generates."""

    def __init__(self, config: OpenEnv) -> None:
        self._config = config
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._heard: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Sends a message, without data where `data` is None, and returns the data of its answer.

        The first message opens the connection, and waits for room on the server.

        Raises:
          Refused: the server answered with an error; the session goes on.
          ConnectionError: the server ended the session.
        """
        until = time.monotonic() + self._config.wait_s
        while True:
            first = self._socket is None
            try:
                return await self._answer(kind, data)
            except Refused as refused:
                if not first or refused.code != "CAPACITY_REACHED" or time.monotonic() + AGAIN_S > until:
                    raise
            await self.close()
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """Ends the session."""
        socket, http, reader = self._socket, self._http, self._reader
        self._socket = self._http = self._reader = None
        self._heard = asyncio.Queue()
        try:
            if socket is not None and not socket.closed:
                await socket.send_json({"type": "close"})
        except ConnectionError:
            pass  # the connection is closed already
        finally:
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if socket is not None:
                await socket.close()
            if http is not None:
                await http.close()

    async def _answer(self, kind: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if self._socket is None:
            self._http = aiohttp.ClientSession()
            self._socket = await self._http.ws_connect(f"{self._config.address}/ws", max_msg_size=MOST_BYTES)
            self._reader = asyncio.create_task(self._read(self._socket))
        await self._socket.send_json({"type": kind} if data is None else {"type": kind, "data": dict(data)})
        message = await self._heard.get()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"{self._config.url} ended the session ({message.type.name})")
        found = json.loads(message.data)
        given: Mapping[str, Any] = found.get("data") or {}
        if found.get("type") == "error":
            more = f" {json.dumps(given['errors'], default=str)}" if given.get("errors") else ""
            raise Refused(str(given.get("code", "UNKNOWN")), f"{given.get('message', '')}{more}")
        return given

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = await socket.receive()
            self._heard.put_nowait(message)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return


class Episode:
    """One rollout, in which each turn is an action."""

    def __init__(self, config: OpenEnv, prompt: Prompt) -> None:
        self.config, self.prompt = config, prompt
        self.connection, self.rewards = Connection(config), list[float | None]()
        self.failed = self.misfits = 0

    async def reset(self, task: Task) -> Observation:
        """Begins the episode; what the environment shows becomes a message of the user."""
        del task
        extra = self.prompt.extra
        given = {name: extra[name] for name in self.config.columns if name in extra}
        found = await self.connection.ask("reset", {"seed": zlib.crc32(self.prompt.id.encode()) >> 1, **given})
        return self._seen(found, [{"role": "user", "content": text}] if (text := self._shown(found)) else [])

    async def step(self, action: Action) -> Observation:
        """Takes the turn's action; raises Refused after more failures of the environment than `tries`."""
        made = action_of(action.text, await self.config.schema())
        if isinstance(made, str):
            self.misfits += 1
            return Observation(messages=[{"role": "user", "content": made}], info=self._info())
        found = await self._stepped(made)
        if isinstance(found, str):
            return Observation(messages=[{"role": "user", "content": found}], info=self._info())
        return self._seen(found, [{"role": "user", "content": self._shown(found)}])

    async def state(self) -> Mapping[str, Any]:
        """Returns the environment's state."""
        return await self.connection.ask("state")

    async def close(self) -> None:
        """Ends the session."""
        await self.connection.close()

    async def _stepped(self, made: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """Returns the answer to a step, or what went wrong with it."""
        try:
            return await self.connection.ask("step", made)
        except Refused as refused:
            if refused.code == "VALIDATION_ERROR":
                self.misfits += 1
            elif refused.code == "EXECUTION_ERROR" and self.failed < self.config.tries:
                self.failed += 1
            else:
                raise
            return f"error: {refused}"

    def _shown(self, found: Mapping[str, Any]) -> str:
        """Returns the text of an observation that the policy reads."""
        seen = {name: value for name, value in (found.get("observation") or {}).items() if name != "metadata"}
        if not self.config.text:
            return json.dumps(seen, ensure_ascii=False) if seen else ""
        if self.config.text not in seen:
            raise ValueError(
                f"OpenEnv.text: the observation has no field {self.config.text!r}; it has {', '.join(sorted(seen))}"
            )
        return str(seen[self.config.text] or "")

    def _seen(self, found: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Observation:
        reward = found.get("reward")
        self.rewards.append(None if reward is None else float(reward))
        return Observation(messages=messages, done=bool(found.get("done")), reward=self.rewards[-1], info=self._info())

    def _info(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "failed_steps": self.failed, "misfits": self.misfits}


class ToolEpisode(Episode):
    """One rollout, in which each turn calls the environment's tools."""

    async def tools(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """Returns the schemas of the tools, by the action `list_tools`; raises ValueError where there are none."""
        del prompt
        found = (await self.connection.ask("step", {"type": "list_tools"})).get("observation") or {}
        if not found.get("tools"):
            why = (found.get("metadata") or {}).get("error", "it lists none")
            raise ValueError(f"OpenEnv.tools: the environment of {self.config.url} has no tools ({why})")
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        kept = [{ours: tool[theirs] for theirs, ours in names.items()} for tool in found["tools"]]
        return [{"type": "function", "function": function} for function in kept]

    async def step(self, action: Action) -> Observation:
        """Answers the calls in their order, until one ends the episode; a turn without a call ends it too."""
        messages, done, rewards = list[Mapping[str, Any]](), not action.calls, list[float]()
        for call in action.calls:
            text, found = await self._called(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
            if found is not None:
                seen = self._seen(found, ())
                rewards += [] if seen.reward is None else [seen.reward]
                done = done or seen.done
        return Observation(messages=messages, done=done, reward=sum(rewards) if rewards else None, info=self._info())

    async def _called(self, call: ToolCall) -> tuple[str, Mapping[str, Any] | None]:
        """Returns the answer to a call, and the environment's observation where the call was made."""
        if call.arguments is None or call.status in ("bad_json", "unclosed"):
            self.misfits += 1
            return f"error: the call could not be read ({call.status}), so it was not made", None
        made = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        found = await self._stepped(made)
        return (found, None) if isinstance(found, str) else (result_of(found.get("observation") or {}), found)


def result_of(observation: Mapping[str, Any]) -> str:
    """Returns the text of a tool's result or error."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error)}"
    result = observation.get("result")
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        texts = [str(part["text"]) for part in result["content"] if isinstance(part, Mapping) and "text" in part]
        return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | str:
    """Reads the action of a turn; returns an error in words where there is none.

    Args:
      text: the policy's turn, without thoughts.
      schema: the JSON schema of actions.

    Returns:
      The JSON object that is the text, or that the last fence holds; else, where the schema needs one field alone, {field: the text, as the
      field's type}. An error in words where the text is none of these.
    """
    for candidate in (text, *reversed(FENCED.findall(text))):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    fields, needed = schema.get("properties") or {}, list(schema.get("required") or ())
    if len(needed) == 1:
        value = _typed(text.strip(), (fields.get(needed[0]) or {}).get("type", "string"))
        if value is not None:
            return {needed[0]: value}
    wanted = {name: fields[name].get("type", "any") for name in (needed or fields) if name != "metadata"}
    return f"error: the action is a JSON object with the fields {json.dumps(wanted)}"


def _typed(text: str, kind: str) -> Any:
    """Reads a text as a value of a JSON type; returns None where it is not of that type."""
    if kind == "string":
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return None
    fits = {"integer": type(value) is int, "number": type(value) in (int, float), "boolean": type(value) is bool,
            "array": type(value) is list}  # fmt: skip
    return value if fits.get(kind, False) else None
