"""Finds all processes that descend from one, measures their memory and number together, and ends them (Linux)."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
EXACT = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def children(process: int) -> list[int]:
    """Returns the children of a process; none where it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as names:
                found += map(int, names.read().split())
    return found


def descendants(process: int, but: Iterable[int] = ()) -> list[int]:
    """Returns all descendants of a process, without `but` and the descendants of these."""
    found, left = [], [c for c in children(process) if c not in but]
    while left:
        one = left.pop()
        found.append(one)
        left += children(one)
    return found


def tasks(processes: Iterable[int]) -> int:
    """Returns the number of threads of the processes."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            total += len(os.listdir(f"/proc/{process}/task"))
    return total


def tasks_of(user: int) -> int:
    """Returns the number of threads that run under a user."""
    mine = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}").st_uid == user:
                mine.append(int(entry))
    return tasks(mine)


def memory(processes: Iterable[int], most: int) -> int:
    """Returns the bytes that the processes hold together: private, shared and swapped out; exact, to a page, where they may exceed `most`.

    Pages that several of them share count once for each at first, which is quick to read; only where that is too much
    are shares of pages read. Shares grow while others end, so the smaller of two looks counts.
    """
    known = list(processes)
    quick = sum(_kilobytes(f"/proc/{one}/status", COUNTED) for one in known) * 1024
    return quick if quick <= most else min(_exact(known) for _ in range(2))


def _exact(processes: Iterable[int]) -> int:
    """Returns the bytes by shares of pages; a process whose shares may not be read counts whole."""
    total = 0
    for one in processes:
        try:
            total += _kilobytes(f"/proc/{one}/smaps_rollup", EXACT)
        except PermissionError:
            total += _kilobytes(f"/proc/{one}/status", COUNTED)
    return total * 1024


def _kilobytes(file: str, names: tuple[str, ...]) -> int:
    """Returns the sum of the named lines; 0 where the process has ended. Raises PermissionError where they may not be read."""
    try:
        with open(file) as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(names))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def on_disk(folder: str) -> tuple[int, int]:
    """Returns (bytes, entries) of the content of a folder."""
    size = count = 0
    for place, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size, count


def end(process: int, but: Iterable[int] = (), limit_s: float = 10.0) -> None:
    """Kills all descendants of a process until there are none.

    Where it is this process, its dead children are waited for: otherwise they count among those of their user until the machine's
    first process reaps them.
    """
    deadline, own = time.monotonic() + limit_s, process == os.getpid()
    while time.monotonic() < deadline:
        found = descendants(process, but)
        if not (found if own else list(_alive(found))):
            return
        for one in found:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
            if own:
                with contextlib.suppress(OSError):
                    os.waitpid(one, os.WNOHANG)


def _alive(processes: Iterable[int]) -> Iterator[int]:
    """Yields the processes that have not ended."""
    for one in processes:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{one}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] not in "ZX":
                yield one
