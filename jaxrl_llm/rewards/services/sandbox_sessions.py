"""Sessions of the sandbox: interpreters that are isolated as every run is, and keep their names and files from cell to cell."""

import asyncio
import contextlib
import json
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.rewards.services.sandbox_run import (
    GUARDS_ENVIRONMENT,
    SLACK_S,
    SLOTS,
    Sandbox,
    Unsafe,
    guard_command,
    interpreters,
    user,
    visible,
)

MOST_LINE = 4 * 2**20  # bytes of a guard's answer
CPU_S = 3600.0  # seconds of an interpreter, over all of its cells
LOOK_S = 1.0  # seconds between two checks for idle sessions
END_S = 5.0
GOES_ON = ("passed", "error")
GONE = (
    "there is no session {id!r}: it ended with a cell that ran out of its limits, was idle for too long, or never began"
)


class Gone(RuntimeError):
    """Raised where there is no such session any more."""


class Full(RuntimeError):
    """Raised where as many sessions are open as may be."""


@dataclass(eq=False, kw_only=True)
class Held:
    """An open session.

    Attributes:
      id: a random name, which is also the right to use it.
      process: its guard.
      folder: its files, where it has no disk of its own.
      slot: number of its user.
      idle_s: seconds without a cell after which it ends.
    """

    id: str
    process: asyncio.subprocess.Process
    folder: str
    slot: int
    idle_s: float
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The sessions of a service.

    Args:
      sandbox: the sandbox, which says how programs are isolated.
      most: largest number of sessions at a time.
      output_kb: printed text of a cell, in KiB, beyond which its middle is left out.

    Raises:
      ValueError: more sessions than there are users for, or none.
    """

    def __init__(self, sandbox: Sandbox, most: int = 32, output_kb: int = 64) -> None:
        room = SLOTS // 2 - sandbox.workers
        if not 1 <= most <= room:
            raise ValueError(
                f"sessions of a sandbox with {sandbox.workers} workers must be in [1, {room}] (got {most})"
            )
        self.sandbox, self.most, self.output = sandbox, most, output_kb * 2**10
        self._free = list(range(sandbox.workers, sandbox.workers + most))[::-1]
        self._held: dict[str, Held] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """The number of open sessions."""
        return self.most - len(self._free)

    async def open(self, idle_s: float, memory_mb: int | None = None) -> str:
        """Opens a session and returns its name.

        Raises:
          Full: as many as there may be are open.
          Unsafe: it could not be isolated.
        """
        if not self._free:
            raise Full(f"{self.most} sessions are open, which is all there may be: close one, or try again later")
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        slot = self._free.pop()
        folder = tempfile.mkdtemp(prefix="sandbox")
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *guard_command("sessions"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=GUARDS_ENVIRONMENT, start_new_session=True, limit=MOST_LINE,
            )  # fmt: skip
            held = Held(id=secrets.token_urlsafe(16), process=process, folder=folder, slot=slot, idle_s=idle_s)
            found = await _asked(process, self._job(slot, folder, memory_mb), 60.0)
            if found["status"] not in GOES_ON:
                raise Unsafe(f"a session could not be shut in: {found['detail']}")
        except BaseException:
            await self._ended(process, folder, slot)
            raise
        self._held[held.id] = held
        return held.id

    async def cell(self, id: str, code: str, limit_s: float) -> dict[str, Any]:
        """Runs a cell and returns how it went; a status that is neither "passed" nor "error" has ended its session.

        Raises:
          Gone: there is no such session.
        """
        held = self._of(id)
        async with held.lock:
            self._of(id)  # it may have ended while another cell ran
            try:
                found = await _asked(held.process, {"code": code, "limit_s": limit_s}, limit_s + SLACK_S)
            except BaseException:  # nobody waits for the cell any more, or its guard has ended
                await self.close(id)
                raise
            held.used = time.monotonic()
            if found["status"] not in GOES_ON:
                await self.close(id)
        if "stdout" not in found:
            raise Gone(f"{GONE.format(id=id)} ({found['detail']})")
        return found

    async def close(self, id: str) -> None:
        """Ends a session; does nothing where it has ended already."""
        if held := self._held.pop(id, None):
            await self._ended(held.process, held.folder, held.slot)

    async def close_all(self) -> None:
        """Ends all sessions."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(self.close(id) for id in list(self._held)))

    def _of(self, id: str) -> Held:
        held = self._held.get(id)
        if held is None:
            raise Gone(GONE.format(id=id))
        return held

    def _job(self, slot: int, folder: str, memory_mb: int | None) -> dict[str, Any]:
        python = self.sandbox.python
        limits = {**self.sandbox.limits, "output": self.output}
        if memory_mb is not None:
            limits["memory"] = min(limits["memory"], memory_mb * 2**20)
        return {
            **limits, "limit_s": CPU_S, "folder": folder, "isolation": self.sandbox.isolation, "python": python,
            "uid": user(slot), "paths": visible(python), "judge_paths": visible(interpreters()[0]),
        }  # fmt: skip

    async def _ended(self, process: asyncio.subprocess.Process | None, folder: str, slot: int) -> None:
        """Ends a guard and the processes that it started, and frees its slot."""
        try:
            if process is not None:
                if process.stdin is not None:
                    process.stdin.close()
                try:
                    await asyncio.wait_for(asyncio.shield(process.wait()), END_S)
                except (TimeoutError, asyncio.CancelledError):
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    raise
        except TimeoutError:
            pass
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._free.append(slot)

    async def _look(self) -> None:
        """Ends idle sessions, at intervals."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            idle = [h.id for h in self._held.values() if not h.lock.locked() and now - h.used > h.idle_s]
            await asyncio.gather(*(self.close(id) for id in idle))


async def _asked(process: asyncio.subprocess.Process, what: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Sends a line to a guard and returns its answer; raises Gone where it has ended, or does not answer in time."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(what).encode() + b"\n")
        await process.stdin.drain()
        line = await asyncio.wait_for(process.stdout.readline(), limit_s)
        found: dict[str, Any] = json.loads(line)
        return found
    except TimeoutError as error:
        raise Gone(f"the session's guard did not answer within {limit_s:g} s") from error
    except (OSError, ValueError) as error:
        raise Gone("the session's guard has ended") from error
