"""Several processes, one a host, as one run: they come together, exchange values of the host in bounded time, and end together.

Each process tells every few moments that it lives, through the coordination service of `jax.distributed`, which process 0
runs. One that is silent for `Hosts.lost_s`, or that says it has ended, ends the others, with an error that names it:
collectives between devices have no limit of time of their own, and a process that waits in one cannot be told otherwise.
"""

import atexit
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxrl_llm import wire, xla_flags

LOST = 76  # exit status: another process of the run was lost; start the same command on every host again
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SIGNAL = " signalled"
_AGAIN = "start the same command on every host again: the run goes on from its last checkpoint"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How the processes of a run on several hosts wait for each other.

    Attributes:
      start_s: most seconds until all processes have come.
      lost_s: seconds without a sign of life after which a process counts as lost, and the others end.
      wait_s: most seconds that a process waits for what another one has to say, such as the rollouts of a step.
    """

    start_s: float = 300.0
    lost_s: float = 60.0
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, least in (("start_s", 1), ("lost_s", 2), ("wait_s", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"hosts.Hosts.{name} must be >= {least} (got {getattr(self, name)})")


class Absent(TimeoutError):
    """Another process, which lives, was waited for in vain."""


@dataclass(kw_only=True, eq=False)
class Processes:
    """The processes of a run, as one of them sees them; by default it is the only one.

    All of them call `broadcast`, `gathered` and `meet` in the same order.

    Attributes:
      limits: how long they wait for each other.
      index: which one this is; process 0 writes, prints and asks samplers.
      count: how many there are.
      names: their hosts' names.
      signalled: whether this process was asked to stop, which it tells the others.
      when_signalled: called, in a thread, when another one was.
    """

    limits: Hosts = field(default_factory=Hosts)
    index: int = 0
    count: int = 1
    names: list[str] = field(default_factory=lambda: [socket.gethostname()])
    signalled: bool = False
    when_signalled: Callable[[], None] | None = None
    _round: int = 0

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes, prints and asks samplers."""
        return self.index == 0

    def named(self, process: int) -> str:
        return f"process {process} ({self.names[process]})"

    def broadcast(self, value: Any = None) -> Any:
        """The value of process 0 on all of them; what the others give does not matter.

        Raises:
          Absent: it said nothing within `limits.wait_s`.
        """
        if self.count == 1:
            return value
        key = self._key("said")
        if self.main:
            _client().key_value_set_bytes(key, wire.packed(value))
        else:
            value = wire.unpacked(self._read(key, 0))
        self._forget(key)
        return value

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; raises as `broadcast` does."""
        if self.count == 1:
            return [value]
        key = self._key("all")
        _client().key_value_set_bytes(f"{key}/{self.index}", wire.packed(value))
        others = range(self.count)
        found = [value if i == self.index else wire.unpacked(self._read(f"{key}/{i}", i)) for i in others]
        self._forget(key)
        return found

    def summed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts of all processes together."""
        return dict(sum((Counter(part) for part in self.gathered(dict(counts))), Counter()))

    def part(self, rows: Sequence[Any], *, whole: bool = False) -> Sequence[Any]:
        """This process's rows of all of them, as many as the others have or one less; all of them if `whole`."""
        if self.count == 1 or whole:
            return rows
        begin, end = (len(rows) * i // self.count for i in (self.index, self.index + 1))
        return [rows[i] for i in range(begin, end)]

    def share(self, folder: Path) -> None:
        """Returns where all processes see one folder.

        Raises:
          OSError: some process sees another one.
        """
        mark = folder / ".shared"
        word = self.broadcast(secrets.token_hex(8))
        if self.main and self.count > 1:
            mark.write_text(word)
        self.meet(f"a look at {folder}")
        seen = self.gathered(self.count == 1 or (mark.is_file() and mark.read_text() == word))
        if self.main:
            mark.unlink(missing_ok=True)
        if others := ", ".join(self.named(i) for i, same in enumerate(seen) if not same):
            raise OSError(
                f"{others} does not see the {folder} of {self.named(0)}: set RUN_DIR to a folder that all hosts share"
            )

    def meet(self, what: str) -> None:
        """Returns when all processes are here.

        Raises:
          Absent: names those that did not come within `limits.wait_s`.
        """
        if self.count == 1:
            return
        key = self._key("met")
        _client().key_value_set(f"{key}/{self.index}", "")
        try:
            _client().wait_at_barrier(key, int(1000 * self.limits.wait_s))
        except jax.errors.JaxRuntimeError as error:
            came = {int(name.rpartition("/")[2]) for name, _ in _client().key_value_dir_get(f"{key}/")}
            absent = ", ".join(self.named(i) for i in range(self.count) if i not in came)
            raise Absent(
                f"{absent or 'a process'} did not come to {what!r} within {self.limits.wait_s:g} s "
                f"(hosts.Hosts.wait_s): look at its output, then {_AGAIN}"
            ) from error
        if self.main:
            _client().key_value_delete(key)

    def _key(self, kind: str) -> str:
        self._round += 1
        return f"jaxrl_llm/{kind}/{self._round}"

    def _read(self, key: str, owner: int) -> bytes:
        try:
            return _client().blocking_key_value_get_bytes(key, int(1000 * self.limits.wait_s))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise Absent(
                f"{self.named(owner)} said nothing within {self.limits.wait_s:g} s (hosts.Hosts.wait_s), and lives: raise the "
                f"limit where steps are that long, else look at what it waits for; {_AGAIN}"
            ) from error

    def _forget(self, key: str) -> None:
        """Drops a message that everyone has read."""
        self.meet(key)
        if self.main:
            _client().key_value_delete(key)


def _client() -> Any:
    """JAX's connection to the coordination service; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


# -- coming together and leaving ---------------------------------------------------------------------------------------


def place(environment: Mapping[str, str], wanted: bool) -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`: of the environment, JAX's own detection where `wanted`, or None.

    Raises:
      ValueError: some of the variables are set and some are not, or one is no number.
    """
    there = [name for name in VARIABLES if environment.get(name)]
    if not there:
        # One process has all devices of its host: Slurm's detection would give it the first GPU alone.
        return {"local_device_ids": list(range(xla_flags.gpus())) or None} if wanted else None
    if len(there) < len(VARIABLES):
        missing = ", ".join(name for name in VARIABLES if name not in there)
        raise ValueError(
            f"{', '.join(there)} without {missing}: a run on several hosts needs all three, or none and --distributed"
        )
    address, count, index = (environment[name] for name in VARIABLES)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count) and ":" in address):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS must be HOST:PORT of process 0 and JAX_PROCESS_ID in 0 .. JAX_NUM_PROCESSES - 1 "
            f"(got {address!r}, {index!r}, {count!r})"
        )
    found = {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
    return None if int(count) == 1 else {**found, "cluster_detection_method": "deactivate"}


@contextlib.contextmanager
def joined(limits: Hosts, arguments: Mapping[str, Any] | None) -> Iterator[Processes]:
    """The processes of the run, together from here to the end; a single one where `arguments` is None.

    An error of this process ends the others; one that comes of the loss of another is said as that. Where not all come within
    `limits.start_s`, the process ends with status LOST.
    """
    if arguments is None:
        yield Processes(limits=limits)
        return
    processes = _together(limits, arguments)
    watch = _Watch(processes)
    try:
        with contextlib.nullcontext() if processes.main else contextlib.redirect_stdout(None):
            yield processes
        processes.meet("the end of the run")
        watch.end("done")
        jax.distributed.shutdown()
    except BaseException as error:
        watch.failed(error)
        raise


def _together(limits: Hosts, arguments: Mapping[str, Any]) -> Processes:
    """Joins the others; JAX's own limits stand behind those of the watch, which names who was lost."""
    where = {name: value for name, value in arguments.items() if name in ("coordinator_address", "process_id")}
    _answer_aborts(
        f"the {arguments.get('num_processes', 'processes')} processes of the run did not come together within "
        f"{limits.start_s:g} s (hosts.Hosts.start_s), as seen from {where or 'here'}: is each host started, and does it "
        "reach the address? The message above may name those that are absent"
    )
    jax.distributed.initialize(
        **arguments,
        initialization_timeout=int(limits.start_s),
        heartbeat_timeout_seconds=int(2 * limits.lost_s) + 5,
        shutdown_timeout_seconds=int(limits.lost_s),
    )
    processes = Processes(limits=limits, index=jax.process_index(), count=jax.process_count())
    processes.names = [""] * processes.count
    processes.names = processes.gathered(socket.gethostname())
    _answer_aborts(f"{processes.named(0)} or its network is gone, by the message above; {_AGAIN}")
    return processes


def _may_be_of_a_loss(error: BaseException) -> bool:
    """Whether the error is one that breaks a collective or a save when another process is gone."""
    words = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
    cause: BaseException | None = None if isinstance(error, Absent) else error
    while cause is not None:
        if isinstance(cause, TimeoutError) or any(word in str(cause) for word in words):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def end(status: int, message: str) -> NoReturn:
    """Says why and ends the process at once, whatever its threads wait for."""
    sys.stdout.flush() if sys.stdout else None
    os.write(2, f"error: {message}\n".encode())
    os._exit(status)


def _answer_aborts(message: str, status: int = LOST) -> None:
    """What is said where JAX aborts the process, as it does when its coordination service is not there or gone.

    The handler is C's: the abort comes in a thread that is none of Python's, and Python's own handlers would run too late.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: end(status, message))
    _handlers.append(handler)
    c_signal()(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


_handlers: list[Any] = []  # C calls them: they must not be collected


def c_signal() -> Any:
    """C's signal(number, handler) -> the handler before."""
    found = ctypes.CDLL(None).signal
    found.argtypes, found.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return found


class _Watch:
    """Tells the others that this process lives, and ends it where one of them does not.

    One thread talks to the service, and another counts the seconds, since a service that is cut off does not answer.
    """

    def __init__(self, processes: Processes) -> None:
        self._all = processes
        self._beat = min(1.0, processes.limits.lost_s / 10)
        self._beats, self._said = 0, "0"
        self._heard: dict[int, str] = {}
        self._silent_s = dict.fromkeys(range(processes.count), 0.0)
        self._over = threading.Event()
        for work in (self._talk, self._count):
            threading.Thread(target=work, daemon=True, name=f"hosts{work.__name__}").start()

    def end(self, word: str) -> None:
        """The last word of this process; it may fail where the service is gone."""
        self._over.set()
        self._said = word
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._exchange()

    def failed(self, error: BaseException) -> None:
        """An error of this process ends the others too; where it comes of another's loss, this one ends with that."""
        if _may_be_of_a_loss(error):
            time.sleep(self._all.limits.lost_s + 3 * self._beat)  # the watch is about to find out whose it is
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _answer_aborts(f"{type(error).__name__}: {error}", status)  # the others end now, and the service with them
        self.end(f"ended: {type(error).__name__}: {error}"[:500])
        if self._all.main:  # with it goes the service, and the others are to read why
            time.sleep(2 * self._beat)
        sys.stdout.flush() if sys.stdout else None
        atexit.register(os._exit, status)  # JAX's own way out waits for the others

    def _exchange(self) -> dict[int, str]:
        key = "jaxrl_llm/alive"
        _client().key_value_set(f"{key}/{self._all.index}", self._said, allow_overwrite=True)
        return {int(name.rpartition("/")[2]): word for name, word in _client().key_value_dir_get(f"{key}/")}

    def _talk(self) -> None:
        while not self._over.wait(self._beat):
            self._beats += 1
            self._said = f"{self._beats}{_SIGNAL if self._all.signalled else ''}"
            try:
                heard = self._exchange()
            except jax.errors.JaxRuntimeError:
                continue  # the other thread counts
            for process, word in heard.items():
                if word.startswith("ended") and not self._over.is_set():
                    end(LOST, f"{self._all.named(process)} {word}")
                if self._heard.get(process) != word or word == "done":
                    self._silent_s[process] = 0.0
                if word.endswith(_SIGNAL) and self._all.when_signalled is not None:
                    self._all.when_signalled()
            self._silent_s[self._all.index] = 0.0
            self._heard |= heard

    def _count(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._beat / 2):
            now = time.monotonic()
            # A process that was stopped itself has not heard from the others either: that time counts little.
            passed, last = min(now - last, 2 * self._beat), now
            for process in self._silent_s:
                self._silent_s[process] += passed
            limit = self._all.limits.lost_s
            if self._silent_s[self._all.index] > limit:
                end(LOST, f"{self._all.named(0)} has not answered for {limit:g} s (hosts.Hosts.lost_s); {_AGAIN}")
            if lost := [p for p, s in self._silent_s.items() if s > limit]:
                who = ", ".join(self._all.named(p) for p in lost)
                end(LOST, f"{who} has given no sign of life for {limit:g} s (hosts.Hosts.lost_s); {_AGAIN}")
