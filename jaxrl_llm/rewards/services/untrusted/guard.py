"""The process that holds runs of untrusted Python: it builds their sandboxes, starts, watches and ends them, and reports the outcomes.

Jobs come one at a time as lines of JSON on standard input, outcomes go as lines of JSON to standard output. Each job is held by a
copy of this process. The program runs as a fresh interpreter in a sandbox of its own (walls.py): with namespaces its root is
a small memory disk with the interpreter and the system's libraries read-only, so it sees no other file and no other
process; with Landlock it sees the machine's processes and the names of its files, and can open none but those.

A program that is tested by its output is judged by its exit status, here, and by its output, in the service. One that is tested by
Python is judged in a second process with a sandbox of its own (judge.py), which asks it by a pipe.

The limits of memory, processes and files apply to the whole tree: this process adds up what all of the program's processes hold,
and kinds of memory that no process seems to hold (memfd, SysV, shared memory without a file) are refused.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.services import confine
from jaxrl_llm.rewards.services.untrusted import judge, process_tree, program, values, walls
from jaxrl_llm.rewards.services.untrusted.walls import SET_DEATH_SIGNAL, SET_SUBREAPER, call

LOOK_S = 0.02  # seconds between two checks of what a run holds
MOST_FILES = 4096
VERDICT = 65536  # bytes of the longest verdict
FAILED = 97  # the exit code of a process that could not be isolated
GRACE_S = 0.2  # seconds for output that is still in the pipes
SEALS = 0xF  # neither content, nor size, nor seals can be changed
# Imported here once, so that tests find them where the judge cannot read the library's files.
PRELOADED = [
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "typing",
]
_BOOT: list[str] = []
_IMPORT = "from jaxrl_llm.rewards.services.untrusted.values import Decoder, Encoder, Line, based\n"


def boot() -> str:
    """Returns the code that the interpreter of a run executes: few imports and no .pth files, which would take most of the time to start."""
    common, own = (Path(module.__file__ or "").read_text() for module in (values, program))
    source = common + own.replace(_IMPORT, "").replace("from __future__ import annotations\n", "")
    return f"import sys\nroom = type(sys)('judged')\nexec(compile({source!r}, 'judged', 'exec'), room.__dict__)\nroom.main()\n"


def begin(job: dict[str, Any], ends: dict[int, int], said: int, changes_user: bool) -> None:
    """Turns the program's process into its interpreter: takes the prepared descriptors, isolates itself, and executes it."""
    try:
        os.setsid()  # signals to its process group reach no other process
        held = {number: fcntl.fcntl(end, fcntl.F_DUPFD, 64) for number, end in ends.items()}
        said = fcntl.fcntl(said, fcntl.F_DUPFD_CLOEXEC, 64)
        text = boot_text()
        walls.shut_program_in(job, changes_user)
        for number, end in held.items():
            os.dup2(end, number)
        os.closerange(max(held) + 1, said)
        os.closerange(said + 1, 1024)
        home = os.getcwd()
        environment = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        os.execve(job["python"], [job["python"], "-I", "-S", "-B", "-c", text], environment)
    except BaseException as error:
        os.write(said, f"{error}".encode())
    finally:
        os._exit(FAILED)


def boot_text() -> str:
    """Returns `boot`, which is read once."""
    if not _BOOT:
        _BOOT.append(boot())
    return _BOOT[0]


class Run:
    """A job in progress."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.tested = job, job["test"] is not None
        self.program = self.judge = 0
        self.got: dict[str, bytes] = dict.fromkeys(("out", "err", "verdict", "setup"), b"")
        self.ends: dict[int, str] = {}
        self.began = time.monotonic()

    def start(self) -> None:
        """Starts the judge, where there is a test, and the program."""
        source = sealed(b"called\n" if self.tested else b"run\n", self.job["program"])
        given = self._input()
        pipes = {name: os.pipe() for name in (*self.got, "calls", "answers")}
        call("prctl", SET_SUBREAPER, 1, 0, 0, 0)
        if self.tested:
            self.judge = os.fork()
            if self.judge == 0:
                self._become_judge(pipes)
        changes_user = walls.can_change_user()
        if self.job["isolation"] == "namespaces":
            changes_user = walls.separate(processes=True)
        elif changes_user:
            os.chown(self.job["folder"], self.job["uid"], self.job["uid"])
        call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # when the process ends that this is a copy of
        self.began = time.monotonic()
        self.program = os.fork()
        if self.program == 0:
            held = {0: given, 1: pipes["out"][1], 2: pipes["err"][1], 3: source, **self._further(pipes)}
            begin(self.job, held, pipes["setup"][1], changes_user)
        for name, (reads, writes) in pipes.items():
            os.close(writes)
            if name in self.got:
                self.ends[reads] = name
            else:
                os.close(reads)
        os.close(source)
        os.close(given)

    def _input(self) -> int:
        """Returns the descriptor of the program's standard input."""
        return sealed(b"", self.job["stdin"])

    def _further(self, pipes: dict[str, tuple[int, int]]) -> dict[int, int]:
        """Returns descriptors of the program beyond its standard ones and its source, by their numbers there."""
        return {4: pipes["answers"][1], 5: pipes["calls"][0]} if self.tested else {}

    def _become_judge(self, pipes: dict[str, tuple[int, int]]) -> None:
        """Runs the judge in its process: keeps its own ends of the pipes, isolates itself, and judges."""
        calls, answers, verdict = pipes["calls"][1], pipes["answers"][0], pipes["verdict"][1]
        try:
            for descriptor in (end for pipe in pipes.values() for end in pipe):
                if descriptor not in (calls, answers, verdict, pipes["setup"][1]):
                    os.close(descriptor)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(nothing, number)
            walls.shut_judge_in(self.job)
        except BaseException as error:
            os.write(pipes["setup"][1], f"judge: {error}".encode())
            os._exit(FAILED)
        os.close(pipes["setup"][1])
        judge.judge(self.job["test"], calls, answers, verdict)

    def follow(self) -> str:
        """Reads the pipes until the run has ended; returns why it was ended, or "" where it ended by itself."""
        programs, judges = os.pidfd_open(self.program), os.pidfd_open(self.judge) if self.judge else -1
        deadline, ended = self.began + self.job["limit_s"], False
        watched = programs
        while True:
            now = time.monotonic()
            if now > deadline:
                return "" if ended and not self.tested else "timeout"
            watching = [*self.ends, *([0] if self.job["cancels"] else []), *([] if ended else [watched])]
            watching += [judges] if judges >= 0 else []
            ready, _, _ = select.select(watching, [], [], min(LOOK_S, deadline - now))
            if 0 in ready:
                return "cancelled"
            for end in ready:
                if end in self.ends and self._read(end):
                    return "output"
            if judges in ready:
                return ""  # what it wrote is read at the end
            if not ended and programs in ready:
                ended = True
                process_tree.end(
                    os.getpid(), but=[self.judge, self.program]
                )  # the judge then reads the end of its answers
                deadline = min(deadline, time.monotonic() + (deadline - now if self.tested else GRACE_S))
            if ended and not self.tested and not {"out", "err"} & set(self.ends.values()):
                return ""
            if not ended and (too_much := self._too_much()):
                return too_much

    def _read(self, end: int) -> bool:
        """Reads from one end; returns whether there is too much of it."""
        name, data = self.ends[end], os.read(end, 65536)
        self.got[name] += data
        if not data:
            del self.ends[end]
        return len(self.got[name]) > (self.job["output"] if name in ("out", "err") else VERDICT)

    def _too_much(self) -> str:
        """Returns which limit the program's processes exceed together, or ""."""
        tree = process_tree.descendants(os.getpid(), but=[self.judge])
        if process_tree.memory(tree, self.job["memory"]) > self.job["memory"]:
            return "memory"
        if process_tree.tasks(tree) > self.job["processes"] + 1:
            return "processes"
        if self.job["isolation"] != "namespaces":  # with namespaces the disk has a size
            size, files = process_tree.on_disk(self.job["folder"])
            return "disk" if size > self.job["disk"] or files > MOST_FILES else ""
        return ""

    def end(self) -> int:
        """Ends the program and whatever it started, and the judge; returns the exit status of the program."""
        status = FAILED << 8
        for child in filter(None, (self.judge, self.program)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in filter(None, (self.judge, self.program)):
            found = os.waitpid(child, 0)[1]
            status = found if child == self.program else status
        process_tree.end(os.getpid())
        while self.ends:  # what is still in the pipes, which have no writer any more
            ready, _, _ = select.select([*self.ends], [], [], 0)
            if not ready or any(self._read(end) for end in ready):
                break
        return status


REASONS = {
    "timeout": ("timeout", "out of time"),
    "output": ("output", "too much output"),
    "memory": ("memory", "out of memory: all processes of the run together held more than it may"),
    "processes": ("error", "too many processes and threads"),
    "disk": ("error", "too much on disk, or too many files"),
    "cancelled": ("cancelled", "nobody waits for it any more"),
}


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the job and returns its outcome."""
    run = Run(job)
    run.start()
    reason = run.follow()
    seconds = time.monotonic() - run.began
    status = run.end()
    if run.got["setup"]:
        found = "setup", run.got["setup"].decode(errors="replace")
    elif reason:
        found = REASONS[reason]
    else:
        found = judged(run, status)
    return {
        "status": found[0],
        "detail": found[1],
        "seconds": seconds,
        "stdout": run.got["out"].decode(errors="replace"),
        "stderr": run.got["err"].decode(errors="replace"),
    }


def judged(run: Run, status: int) -> tuple[str, str]:
    """Returns (status, detail) of a run that ended by itself."""
    said, _, detail = run.got["verdict"].decode(errors="replace").partition("\n")
    if run.tested and said and "EOFError: the program has ended" not in detail:
        return said, detail
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if not by_signal else 0
    if not run.tested and not status:
        return "passed", ""
    errors = run.got["err"].decode(errors="replace").strip()
    kind = "memory" if errors.rpartition("\n")[2].startswith("MemoryError") else "error"
    kind = "timeout" if by_signal == signal.SIGXCPU else kind
    return kind, f"ended early ({f'signal {by_signal}' if by_signal else f'exit code {code}'})" + (
        f": {errors[-500:]}" if errors else ""
    )


def sealed(head: bytes, text: str) -> int:
    """Returns a descriptor from which `head` and `text` are read, and which cannot be written."""
    made = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(made), "wb") as out:
        out.write(head + text.encode("utf-8", "surrogatepass"))
    os.lseek(made, 0, 0)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, SEALS)
    return made


def main() -> None:
    """Holds a run for each line of standard input, until the input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    boot_text()
    with contextlib.suppress(OSError):
        confine.seccomp()  # the first job says what is missing
    while line := sys.stdin.buffer.readline():
        guard = os.fork()
        if guard == 0:
            try:
                found = outcome(json.loads(line))
            except OSError as error:
                found = {"status": "setup", "detail": str(error), "seconds": 0.0, "stdout": "", "stderr": ""}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(guard, 0)[1]:
            os._exit(1)  # this job gets no answer


if __name__ == "__main__":
    main()
