"""The processes of a run, one per host: they exchange host values in bounded time and split the rows of a dataset.

Small values travel over the coordination service of `jax.distributed`, which process 0 runs; rendezvous.py starts it and watches the
other processes. Large values, such as the rollouts of a step, travel between devices, in parts: the service is slow and takes no value over
2 GiB. A collective has no time limit of its own, so it begins when all processes have come to it, within the limit, and the watch ends a
process that waits in one for a lost process.
"""

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import components
from jaxrl_llm.distributed import serialization

SMALL = 2**20  # bytes of the largest value that travels over the coordination service
PART = 8 * 2**20  # bytes that travel between devices at a time
Pieces = Sequence[bytes | memoryview]  # consecutive pieces of a message
_HERE, _BETWEEN_DEVICES = b"\0", b"\1"  # first byte of a message: the value follows, or its length alone

AGAIN = "start the same command on every host again: the run goes on from its last checkpoint"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Time limits for the processes of a run on several hosts, in seconds.

    Attributes:
      start_s: seconds within which all processes must join.
      lost_s: seconds without a sign of life after which a process counts as lost, and the others end.
      wait_s: seconds that a process waits for a message from another one, such as the rollouts of a step.
    """

    start_s: float = 300.0
    lost_s: float = 60.0
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        components.at_least(self, 1, "start_s", "wait_s")
        components.at_least(self, 2, "lost_s")


class Absent(TimeoutError):
    """Raised where another process is alive but did not answer in time."""


@dataclass(kw_only=True, eq=False)
class Processes:
    """The processes of a run, as seen by one of them; by default it is the only one.

    All processes must call `broadcast`, `gathered` and `meet` in the same order, and run no other program on all devices meanwhile.

    Attributes:
      limits: time limits of the waits for each other.
      index: number of this process; process 0 writes, prints and calls samplers.
      count: number of processes.
      names: host name of each process.
      signalled: whether this process was signalled to stop, which it reports to the others.
      when_signalled: function that is called in a thread when another process was signalled.
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
        """Whether this process is the one that writes, prints and calls samplers."""
        return self.index == 0

    def named(self, process: int) -> str:
        return f"process {process} ({self.names[process]})"

    def broadcast(self, value: Any = None) -> Any:
        """Returns the value of process 0 on all processes; the values of the others are ignored.

        Raises:
          Absent: process 0 sent nothing within `limits.wait_s`, or did so and another process did not come to receive it.
        """
        if self.count == 1:
            return value
        (data,) = self._exchanged("said", serialization.pieces(value) if self.main else [], [0])
        return value if self.main else serialization.unpacked(data)

    def gathered(self, value: Any) -> list[Any]:
        """Returns the values of all processes in order of their index; raises as `broadcast` does."""
        if self.count == 1:
            return [value]
        found = self._exchanged("all", serialization.pieces(value), range(self.count))
        return [value if i == self.index else serialization.unpacked(data) for i, data in enumerate(found)]

    def summed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the counts of all processes, added up."""
        return dict(sum((Counter(part) for part in self.gathered(dict(counts))), Counter()))

    def same(self, what: str, value: Any) -> None:
        """Checks that all processes have the same value.

        Raises:
          ValueError: some values differ; the message names the processes that differ from process 0.
        """
        found = self.gathered(value)
        if others := ", ".join(self.named(i) for i, x in enumerate(found) if x != found[0]):
            raise ValueError(
                f"{others} has not {what} of {self.named(0)}: start the same command on the same files on every host"
            )

    def part(self, rows: Sequence[Any], *, whole: bool = False) -> Sequence[Any]:
        """Returns this process's part of `rows`, where sizes of parts differ by at most one; all rows if `whole`."""
        if self.count == 1 or whole:
            return rows
        begin, end = (len(rows) * i // self.count for i in (self.index, self.index + 1))
        return [rows[i] for i in range(begin, end)]

    def share(self, folder: Path) -> None:
        """Checks that all processes see the same folder.

        Raises:
          OSError: some process sees another folder.
        """
        if others := ", ".join(self.named(i) for i in self.blind(folder)):
            raise OSError(
                f"{others} does not see the {folder} of {self.named(0)}: set RUN_DIR to a folder that all hosts share"
            )

    def blind(self, folder: Path) -> list[int]:
        """Returns the processes that do not see the folder of process 0 where each gives its own path to it."""
        mark = folder / ".shared"
        word = self.broadcast(secrets.token_hex(8))
        if self.main and self.count > 1:
            mark.write_text(word)
        self.meet(f"a look at {folder}")
        seen = self.gathered(self.count == 1 or (mark.is_file() and mark.read_text() == word))
        if self.main:
            mark.unlink(missing_ok=True)
        return [i for i, same in enumerate(seen) if not same]

    def meet(self, what: str) -> None:
        """Waits until all processes have called it; `what` names the occasion in errors.

        Raises:
          Absent: some did not come within `limits.wait_s`; the message names them.
        """
        if self.count == 1:
            return
        key = self._key("met")
        client().key_value_set(f"{key}/{self.index}", "")
        try:
            client().wait_at_barrier(key, int(1000 * self.limits.wait_s))
        except jax.errors.JaxRuntimeError as error:
            came = {int(name.rpartition("/")[2]) for name, _ in client().key_value_dir_get(f"{key}/")}
            absent = ", ".join(self.named(i) for i in range(self.count) if i not in came)
            raise Absent(
                f"{absent or 'a process'} did not come to {what!r} within {self.limits.wait_s:g} s "
                f"(train.Hosts.wait_s): look at its output, then {AGAIN}"
            ) from error
        if self.main:
            client().key_value_delete(key)

    def _key(self, kind: str) -> str:
        self._round += 1
        return f"jaxrl_llm/{kind}/{self._round}"

    def _exchanged(self, kind: str, own: Pieces, owners: Sequence[int]) -> list[bytes | memoryview]:
        """Returns the messages of the processes `owners`, on all processes; a large one of this process is b"". `own` are this one's pieces."""
        key, size = self._key(kind), sum(map(len, own))
        note = b"".join([_HERE, *own]) if size <= SMALL else _BETWEEN_DEVICES + str(size).encode()
        if self.index in owners:
            client().key_value_set_bytes(f"{key}/{self.index}", note)
        notes = [note if i == self.index else self._read(f"{key}/{i}", i) for i in owners]
        if any(note.startswith(_BETWEEN_DEVICES) for note in notes):
            self.meet("an exchange between devices")
        found = [
            note[1:] if note.startswith(_HERE) else self._between_devices(own, int(note[1:]), owner)
            for owner, note in zip(owners, notes, strict=True)
        ]
        self._forget(key)
        return found

    def _between_devices(self, own: Pieces, size: int, owner: int) -> bytes | memoryview:
        """Sends the message of `owner`, of `size` bytes, to the others, where it is returned; all parts have one length, for one compiled program."""
        if self.index == owner:
            for part in _parts(own):
                multihost_utils.broadcast_one_to_all(part, is_source=True)
            return b""
        data, nothing = np.empty(size, np.uint8), np.zeros(PART, np.uint8)
        for begin in range(0, size, PART):
            here = data[begin : begin + PART]
            here[:] = multihost_utils.broadcast_one_to_all(nothing, is_source=False)[: len(here)]
        return data.data

    def _read(self, key: str, owner: int) -> bytes:
        try:
            return client().blocking_key_value_get_bytes(key, int(1000 * self.limits.wait_s))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise Absent(
                f"{self.named(owner)} said nothing within {self.limits.wait_s:g} s (train.Hosts.wait_s), and lives: raise the "
                f"limit where steps are that long, else look at what it waits for; {AGAIN}"
            ) from error

    def _forget(self, key: str) -> None:
        """Deletes a message once every process has read it."""
        self.meet(key)
        if self.main:
            client().key_value_delete(key)


def _parts(pieces: Pieces) -> Iterator[np.ndarray]:
    """Yields the bytes of the pieces in parts of PART bytes; the end of the last part holds stale bytes."""
    part, filled = np.zeros(PART, np.uint8), 0
    for piece in pieces:
        rest = np.frombuffer(piece, np.uint8)
        while len(rest):
            taken = rest[: PART - filled]
            part[filled : filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken) :]
            if filled == PART:
                yield part
                filled = 0
    if filled:
        yield part


def client() -> Any:
    """Returns JAX's connection to the coordination service; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
