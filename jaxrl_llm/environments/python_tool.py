"""A Python interpreter as a tool, in a session of the sandbox: names and files persist across the calls of a rollout."""

import asyncio
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import aiohttp

from jaxrl_llm import components
from jaxrl_llm.environments import tools
from jaxrl_llm.experience import Prompt
from jaxrl_llm.rewards.services.sandbox_run import Sandbox
from jaxrl_llm.rewards.services.sandbox_sessions import Full, Gone, Sessions

SLACK_S = 30.0  # seconds beyond a cell's own limit, for the service's answer
WAIT_S = 0.2  # seconds between two requests for a session where all are in use
GOES_ON = ("passed", "error")
LOST = "session lost: the names and files of earlier calls are gone, and the next call begins anew"


@runtime_checkable
class Interpreters(Protocol):
    """Opens sessions and runs code in them: `sandbox_sessions.Sessions` in this process, or a service's."""

    async def open(self, idle_s: float, memory_mb: int | None = None) -> str: ...

    async def cell(self, id: str, code: str, limit_s: float) -> dict[str, Any]: ...

    async def close(self, id: str) -> None: ...

    def end(self) -> None:
        """Ends the sessions that this process holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Python:
    """The tool `python`, which executes code and answers with its output and the value of its last expression.

    Attributes:
      url: address of the sandbox service (`python -m jaxrl_llm.rewards.services.sandbox`); empty runs the sandbox on this machine, from
        the run's own process.
      token_env: environment variable that holds the service's bearer token; empty sends none.
      sessions: most interpreters at a time where `url` is empty; a rollout waits for one where all are in use.
      wait_s: most seconds of that wait, after which the rollout is invalid.
      cell_s: seconds of one call; one that takes longer loses its session.
      memory_mb: memory of one interpreter, in MiB.
      idle_s: seconds without a call after which a service ends a session.
      most_text: most characters of an answer; a longer one is cut in its middle.
    """

    url: str = ""
    token_env: str = ""
    sessions: int = 32
    wait_s: float = 60.0
    cell_s: float = 5.0
    memory_mb: int = 512
    idle_s: float = 600.0
    most_text: int = 2000
    _places: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Interpreters]" = field(
        init=False, repr=False, compare=False, default_factory=weakref.WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            components.refuse(self, "url", "an address that begins with http:// or https://, or empty")
        components.above(self, 0, "wait_s", "cell_s", "idle_s")
        components.at_least(self, 1, "sessions", "memory_mb")
        components.at_least(self, 100, "most_text")

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool's schema in OpenAI's form, with one argument, the code."""
        return tools.function(
            "python",
            "Runs Python code and returns what it prints and the value of its last expression. Names stay from call to call.",
            code="the code to run",
        )

    def use(self, prompt: Prompt, seed: int) -> "InUse":
        """Returns the interpreter of one rollout, which its first call starts."""
        del prompt, seed
        return InUse(self)

    def place(self) -> Interpreters:
        """Returns the sessions of this event loop, made at the first use."""
        loop = asyncio.get_running_loop()
        if loop not in self._places:
            self._places[loop] = _Remote(self) if self.url else _Local(self)
        return self._places[loop]

    def close(self) -> None:
        """Ends the interpreters of this process."""
        for place in list(self._places.values()):
            place.end()
        self._places.clear()

    def answer(self, found: Mapping[str, Any]) -> str:
        """Returns the text of a cell's result that the policy reads."""
        parts = [str(found["stdout"]).rstrip("\n"), str(found["value"]), str(found["stderr"]).rstrip("\n")]
        if found["status"] == "error":
            parts.append(str(found["detail"]))
        elif found["status"] not in GOES_ON:
            parts.append(f"{found['status']}: {found['detail']}; {LOST}")
        text = "\n".join(part for part in parts if part) or "(no output)"
        left_out, half = len(text) - self.most_text, self.most_text // 2
        return text if left_out <= 0 else f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


class InUse:
    """The interpreter of one rollout."""

    def __init__(self, tool: Python) -> None:
        self.tool, self._id = tool, ""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Executes the code of a call; raises tools.Failed with the answer where it did not run to its end."""
        found = await self.cell(tools.text_argument(arguments, "code"))
        answer = LOST if found is None else self.tool.answer(found)
        if found is None or found["status"] != "passed":
            raise tools.Failed(answer)
        return answer

    async def cell(self, code: str) -> Mapping[str, Any] | None:
        """Runs code and returns its result, as `Interpreters.cell` does; None where the session was lost before."""
        place = self.tool.place()
        if not self._id:
            self._id = await self._opened(place)
        try:
            found = await place.cell(self._id, code, self.tool.cell_s)
        except Gone:
            self._id = ""
            return None
        if found["status"] not in GOES_ON:
            self._id = ""
        return found

    async def close(self) -> None:
        """Ends the interpreter."""
        if self._id:
            id, self._id = self._id, ""
            await self.tool.place().close(id)

    async def _opened(self, place: Interpreters) -> str:
        """Opens a session, and waits where all are in use; raises TimeoutError where none is free in time."""
        async with asyncio.timeout(self.tool.wait_s):
            while True:
                try:
                    return await place.open(self.tool.idle_s, self.tool.memory_mb)
                except Full:
                    await asyncio.sleep(WAIT_S)


class _Local:
    """Sessions of this process; the first use tests their isolation, and raises sandbox_run.Unsafe where there is none."""

    def __init__(self, tool: Python) -> None:
        self._sandbox = Sandbox(workers=1, memory_mb=tool.memory_mb)
        self._sessions = Sessions(self._sandbox, tool.sessions)
        self._ready: asyncio.Task[Any] | None = None

    async def open(self, idle_s: float, memory_mb: int | None = None) -> str:
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._sandbox.prepare())
        await asyncio.shield(self._ready)
        return await self._sessions.open(idle_s, memory_mb)

    async def cell(self, id: str, code: str, limit_s: float) -> dict[str, Any]:
        return await self._sessions.cell(id, code, limit_s)

    async def close(self, id: str) -> None:
        await self._sessions.close(id)

    def end(self) -> None:
        self._sandbox.close()


class _Remote:
    """Sessions of a service. A cell is never sent twice, since it may have changed the session."""

    def __init__(self, tool: Python) -> None:
        self._tool = tool

    async def open(self, idle_s: float, memory_mb: int | None = None) -> str:
        return str((await self._ask("POST", "/sessions", {"idle_s": idle_s, "memory_mb": memory_mb}, SLACK_S))["id"])

    async def cell(self, id: str, code: str, limit_s: float) -> dict[str, Any]:
        return await self._ask(
            "POST", f"/sessions/{id}/cells", {"code": code, "max_execution_time": limit_s}, limit_s + SLACK_S
        )

    async def close(self, id: str) -> None:
        await self._ask("DELETE", f"/sessions/{id}", None, SLACK_S)

    def end(self) -> None:
        """Does nothing, since this process holds no session."""

    async def _ask(self, verb: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any]:
        """Sends a request and returns the service's answer; raises Full, Gone, and RuntimeError for any other refusal."""
        token = os.environ.get(self._tool.token_env, "") if self._tool.token_env else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limit = aiohttp.ClientTimeout(total=limit_s)
        async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
            async with session.request(verb, self._tool.url.rstrip("/") + path, json=body) as response:
                if response.status == 200:
                    found: dict[str, Any] = await response.json()
                    return found
                problem = f"{self._tool.url}{path}: {response.status}: {(await response.text())[:500]}"
        kinds: dict[int, type[RuntimeError]] = {410: Gone, 429: Full}
        raise kinds.get(response.status, RuntimeError)(problem)
