"""Joins the other processes of a run, watches them by heartbeats, and ends together with them.

Each process reports regularly that it is alive, through the coordination service of `jax.distributed`. A process that is
silent for `Hosts.lost_s`, or that reports that it has ended, makes the others end with an error that names it: collectives
between devices have no time limit of their own, and a process that waits in one cannot be informed otherwise.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax

from jaxrl_llm.distributed import compilation_cache, xla_flags
from jaxrl_llm.distributed.processes import AGAIN, Absent, Hosts, Processes, client

_log = logging.getLogger(__name__)

LOST = 76  # exit status: another process of the run was lost; start the same command on every host again
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SIGNAL = " signalled"  # ends the report of a process that was signalled to stop


def coordinator_arguments(environment: Mapping[str, str], wanted: bool) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`: from the environment, or, where `wanted`, for JAX's own detection; else None.

    Raises:
      ValueError: some of the variables are set and some are not, or one has no valid value.
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
    """Joins the processes of the run and ends together with them; yields a single process where `arguments` is None.

    An error of this process ends the others; an error that comes from the loss of another process is reported as that loss. Where
    not all processes join within `limits.start_s`, the process ends with status LOST.
    """
    if arguments is None:
        yield Processes(limits=limits)
        return
    processes = _together(limits, arguments)
    watch = _Watch(processes)
    try:
        if (loss := compilation_cache.alone(processes)) and processes.main:
            _log.warning(loss)
        with contextlib.nullcontext() if processes.main else contextlib.redirect_stdout(None):
            yield processes
        processes.meet("the end of the run")
        watch.end("done")
        jax.distributed.shutdown()
    except BaseException as error:
        watch.failed(error)
        raise


def _together(limits: Hosts, arguments: Mapping[str, Any]) -> Processes:
    """Joins the other processes; JAX's own heartbeat limit is longer than the watch's, so that the watch can name who was lost."""
    where = {name: value for name, value in arguments.items() if name in ("coordinator_address", "process_id")}
    _answer_aborts(
        f"the {arguments.get('num_processes', 'processes')} processes of the run did not come together within "
        f"{limits.start_s:g} s (train.Hosts.start_s), as seen from {where or 'here'}: is each host started, and does it "
        "reach the address? The message above may name those that are absent"
    )
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=int(limits.start_s),
            heartbeat_timeout_seconds=int(2 * limits.lost_s) + 5,
            shutdown_timeout_seconds=int(limits.lost_s),
        )
    except ValueError as error:
        raise ValueError(
            f"--distributed asks JAX where the other processes are, and it knows of none here ({error}): set "
            f"{', '.join(VARIABLES)}, or leave it out for a run of one process"
        ) from error
    processes = Processes(limits=limits, index=jax.process_index(), count=jax.process_count())
    processes.names = [""] * processes.count
    processes.names = processes.gathered(socket.gethostname())
    _answer_aborts(f"{processes.named(0)} or its network is gone, by the message above; {AGAIN}")
    return processes


def _may_be_of_a_loss(error: BaseException) -> bool:
    """Returns whether the error may be one that breaks a collective or a save when another process is gone."""
    words = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
    cause: BaseException | None = None if isinstance(error, Absent) else error
    while cause is not None:
        if isinstance(cause, TimeoutError) or any(word in str(cause) for word in words):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def end(status: int, message: str) -> NoReturn:
    """Prints the reason and ends the process at once, whatever its threads wait for."""
    sys.stdout.flush() if sys.stdout else None
    os.write(2, f"error: {message}\n".encode())
    os._exit(status)


def _answer_aborts(message: str, status: int = LOST) -> None:
    """Sets what is printed where JAX aborts the process, as it does when its coordination service is absent or gone.

    The handler is installed in C: the abort comes in a thread that is not Python's, and Python's own handlers would run too late.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: end(status, message))
    _handlers.append(handler)
    c_signal()(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


_handlers: list[Any] = []  # C calls these handlers, so they must not be garbage-collected


def c_signal() -> Any:
    """Returns C's signal(number, handler), which itself returns the previous handler."""
    found = ctypes.CDLL(None).signal
    found.argtypes, found.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return found


class _Watch:
    """A watch, which reports to the others that this process is alive, and ends it where one of them is not.

    One thread talks to the service, and another counts the seconds, since a call of a service that is cut off does not return.
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
        """Sends the last report of this process; this may fail where the service is gone."""
        self._over.set()
        self._said = word
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._exchange()

    def failed(self, error: BaseException) -> None:
        """Reports an error of this process, which ends the others; where it comes from another's loss, the watch reports that loss."""
        if _may_be_of_a_loss(error):
            time.sleep(self._all.limits.lost_s + 3 * self._beat)  # the watch is about to find the lost process
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _answer_aborts(f"{type(error).__name__}: {error}", status)  # the others end now, and the service with them
        self.end(f"ended: {type(error).__name__}: {error}"[:500])
        if self._all.main:  # the service ends with this process, and the others must read the reason first
            time.sleep(2 * self._beat)
        sys.stdout.flush() if sys.stdout else None
        atexit.register(os._exit, status)  # JAX's own exit handler waits for the others

    def _exchange(self) -> dict[int, str]:
        key = "jaxrl_llm/alive"
        client().key_value_set(f"{key}/{self._all.index}", self._said, allow_overwrite=True)
        return {int(name.rpartition("/")[2]): word for name, word in client().key_value_dir_get(f"{key}/")}

    def _talk(self) -> None:
        while not self._over.wait(self._beat):
            self._beats += 1
            self._said = f"{self._beats}{_SIGNAL if self._all.signalled else ''}"
            try:
                heard = self._exchange()
            except jax.errors.JaxRuntimeError:
                continue  # the other thread counts the silence
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
            # A process that was suspended itself has not heard from the others meanwhile, so that time counts little.
            passed, last = min(now - last, 2 * self._beat), now
            for process in self._silent_s:
                self._silent_s[process] += passed
            limit = self._all.limits.lost_s
            if self._silent_s[self._all.index] > limit:
                end(LOST, f"{self._all.named(0)} has not answered for {limit:g} s (train.Hosts.lost_s); {AGAIN}")
            if lost := [p for p, s in self._silent_s.items() if s > limit]:
                who = ", ".join(self._all.named(p) for p in lost)
                end(LOST, f"{who} has given no sign of life for {limit:g} s (train.Hosts.lost_s); {AGAIN}")
