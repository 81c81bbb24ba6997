"""The process that holds one session of untrusted Python: an interpreter that is isolated as any run is, and executes cell after cell.

The first line of JSON on standard input is the job, as in guard.py; it is answered when the interpreter is ready. Each further line is a
cell {"code", "limit_s"}, and is answered by {"status", "detail", "seconds", "stdout", "stderr", "truncated", "value"}. A status other than
"passed" and "error" (the cell raised, the session continues) ends the session, since an interrupt of untrusted code cannot be trusted.
The interpreter is watched between cells as well. The end of standard input ends the session.
"""

import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.services import confine
from jaxrl_llm.rewards.services.untrusted import cells
from jaxrl_llm.rewards.services.untrusted.guard import LOOK_S, REASONS, VERDICT, Run

READY_S = 30.0  # seconds for the interpreter to start
IDLE_LOOK_S = 0.5  # seconds between two checks of what a session holds while no cell runs
DRAINS = 64  # largest number of reads from the pipes after a cell; threads of the session may write for ever
GOES_ON = ("passed", "error")
ENDED = ("ended", "the session's interpreter has ended")
BROKEN = ("ended", "the session's interpreter says nothing that can be read")


class Session(Run):
    """The run of an interpreter, from its first cell to its last."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__({**job, "test": None, "cancels": True, "program": Path(cells.__file__).read_text()})
        self.cells = -1
        self.left_out = dict.fromkeys(("out", "err"), 0)

    def begin(self) -> tuple[str, str]:
        """Starts the interpreter; returns (status, detail) when it is ready, or could not be isolated."""
        self.start()
        self.pid = os.pidfd_open(self.program)
        reason = self._wait(time.monotonic() + READY_S)
        if self.got["setup"]:
            return "setup", self.got["setup"].decode(errors="replace")
        return self._verdict(reason)[:2]

    def cell(self, code: str, limit_s: float) -> dict[str, Any]:
        """Executes a cell, for at most `limit_s` seconds, and returns how it went."""
        began = time.monotonic()
        self.got |= {"out": b"", "err": b"", "verdict": b""}
        self.left_out = dict.fromkeys(self.left_out, 0)
        reason = self._send(code, began + limit_s) or self._wait(began + limit_s)
        seconds = time.monotonic() - began
        self._drain()
        status, detail, value = self._verdict(reason)
        printed = {name: self._text(end) for name, end in (("stdout", "out"), ("stderr", "err"))}
        truncated = any(self.left_out.values())
        return {
            "status": status,
            "detail": detail,
            "seconds": seconds,
            **printed,
            "truncated": truncated,
            "value": value,
        }

    def rest(self) -> str:
        """Waits for standard input; returns "" where it has something, else why the session ends."""
        reason = self._wait(None)
        return "" if reason == "cancelled" else reason

    def _input(self) -> int:
        theirs, self.cells = os.pipe()
        return theirs

    def _further(self, pipes: dict[str, tuple[int, int]]) -> dict[int, int]:
        return {cells.RECORDS: pipes["verdict"][1]}

    def _send(self, code: str, deadline: float) -> str:
        """Writes a cell to the interpreter, which may not read it; returns why the session ends then, or ""."""
        text = code.encode("utf-8", "surrogatepass")
        left = len(text).to_bytes(4, "big") + text
        os.set_blocking(self.cells, False)
        while left:
            if time.monotonic() > deadline:
                return "timeout"
            try:
                if select.select([], [self.cells], [], LOOK_S)[1]:
                    left = left[os.write(self.cells, left) :]
            except BrokenPipeError:
                return "ended"
        return ""

    def _wait(self, deadline: float | None) -> str:
        """Reads until a cell's record is whole ("") or, without a deadline, until standard input says something ("cancelled").

        Any other result says why the session has to end.
        """
        while True:
            now = time.monotonic()
            if deadline is not None and now > deadline:
                return "timeout"
            pause = IDLE_LOOK_S if deadline is None else min(LOOK_S, deadline - now)
            ready, _, _ = select.select([*self.ends, 0, self.pid], [], [], pause)
            broken = max(*map(self._read, filter(self.ends.__contains__, ready)), False, False)
            if deadline is not None and b"\n" in self.got["verdict"]:
                return ""
            if self.got["setup"] or self.pid in ready or broken:
                return "ended"
            if 0 in ready:
                return "cancelled"
            if too_much := self._too_much():
                return too_much

    def _read(self, end: int) -> bool:
        """Reads from one end, and leaves out the middle of a long output; returns whether a record is too long."""
        name, data = self.ends[end], os.read(end, 65536)
        self.got[name] += data
        if not data:
            del self.ends[end]
        if name in self.left_out and len(self.got[name]) > 2 * self.job["output"]:
            self._shorten(name)
        return len(self.got["verdict"]) > VERDICT

    def _shorten(self, name: str) -> None:
        half = self.job["output"] // 2
        self.left_out[name] += len(self.got[name]) - 2 * half
        self.got[name] = self.got[name][:half] + self.got[name][-half:]

    def _drain(self) -> None:
        for _ in range(DRAINS):
            ready, _, _ = select.select([*self.ends], [], [], 0)
            if not ready:
                return
            for end in ready:
                self._read(end)

    def _text(self, name: str) -> str:
        """Returns the printed text, with a mark where its middle was left out."""
        if len(self.got[name]) > self.job["output"]:
            self._shorten(name)
        if not self.left_out[name]:
            return self.got[name].decode(errors="replace")
        half = self.job["output"] // 2
        head, tail = (part.decode(errors="replace") for part in (self.got[name][:half], self.got[name][half:]))
        return f"{head}\n[... {self.left_out[name]} bytes left out ...]\n{tail}"

    def _verdict(self, reason: str) -> tuple[str, str, str]:
        """Returns (status, detail, value) of a cell, or of the start."""
        if reason:
            return *(ENDED if reason == "ended" else REASONS[reason]), ""
        try:
            found = json.loads(self.got["verdict"].partition(b"\n")[0])
            value, error = str(found["value"]), str(found["error"])
        except (ValueError, KeyError, TypeError):
            return *BROKEN, ""
        return "error" if error else "passed", error, value


def main() -> None:
    """Holds a session until standard input, or the session, ends."""
    with contextlib.suppress(OSError):
        confine.seccomp()  # while its files can still be read; the job says what is missing
    answer({"status": "setup", "detail": "no job"}) if not (line := sys.stdin.buffer.readline()) else hold(line)


def hold(line: bytes) -> None:
    """Holds the session of a job."""
    session = Session(json.loads(line))
    try:
        status, detail = session.begin()
        answer({"status": status, "detail": detail})
        while status in GOES_ON and not (reason := session.rest()):
            line = sys.stdin.buffer.readline()
            if not line:
                return
            found = session.cell(**json.loads(line))
            answer(found)
            status = found["status"]
        if status in GOES_ON:
            answer({"status": "ended", "detail": f"between two cells: {reason}"})
    except OSError as error:
        answer({"status": "setup", "detail": str(error)})
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            session.end()


def answer(what: dict[str, Any]) -> None:
    """Writes a line of JSON."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
