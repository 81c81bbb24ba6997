"""The processes of a run, one a host: they exchange values of the host in bounded time, and read their parts of the rows.

Values travel over the coordination service of `jax.distributed`, which process 0 runs; rendezvous.py starts it and watches.
"""

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import components
from jaxrl_llm.distributed import serialization

AGAIN = "start the same command on every host again: the run goes on from its last checkpoint"


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
        components.at_least(self, 1, "start_s", "wait_s")
        components.at_least(self, 2, "lost_s")


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
            client().key_value_set_bytes(key, serialization.packed(value))
        else:
            value = serialization.unpacked(self._read(key, 0))
        self._forget(key)
        return value

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; raises as `broadcast` does."""
        if self.count == 1:
            return [value]
        key = self._key("all")
        client().key_value_set_bytes(f"{key}/{self.index}", serialization.packed(value))
        others = range(self.count)
        found = [value if i == self.index else serialization.unpacked(self._read(f"{key}/{i}", i)) for i in others]
        self._forget(key)
        return found

    def summed(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts of all processes together."""
        return dict(sum((Counter(part) for part in self.gathered(dict(counts))), Counter()))

    def same(self, what: str, value: Any) -> None:
        """Returns where all processes have one value.

        Raises:
          ValueError: names those that have another one than process 0.
        """
        found = self.gathered(value)
        if others := ", ".join(self.named(i) for i, x in enumerate(found) if x != found[0]):
            raise ValueError(
                f"{others} has not {what} of {self.named(0)}: start the same command on the same files on every host"
            )

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
        """Drops a message that everyone has read."""
        self.meet(key)
        if self.main:
            client().key_value_delete(key)


def client() -> Any:
    """JAX's connection to the coordination service; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
