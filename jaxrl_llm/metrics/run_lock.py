"""Admits one writer at a time to the folder of a run or an evaluation.

The lock is flock(2) on FOLDER/.lock, which the kernel frees when the process ends, however that ends, and which Linux extends to other
hosts over NFS. FOLDER/owner.json names the owner, and its modification time is a heartbeat: on a file system without flock, or with one
of this host alone, waiting for the next beat shows whether the last owner has died.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxrl_llm.metrics.run_folder import replace_text

_log = logging.getLogger(__name__)

BEAT_S = 5.0  # seconds between heartbeats
SILENT_S = 4 * BEAT_S  # an owner on another host that is silent for so long has ended
_MISSING = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder: Path, macro: str = "RUN_DIR") -> Iterator[None]:
    """Keeps other processes out of `folder`, on this host and on others that share it.

    Raises:
      ValueError: another process writes there; the message names it, and the `macro` that sets another folder.
    """
    owner = folder / "owner.json"
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _MISSING:
                raise ValueError(_held(folder, _read(owner), macro)) from error
            _log.warning("%s has no file locks: the folder is kept by the heartbeat of owner.json alone", folder)
        last = _read(owner)
        if last:
            if _lives(owner, last, file.name):
                raise ValueError(_held(folder, last, macro))
            _log.warning("took over %s from %s, which ended without leaving it", folder, _named(last))
        with _beating(owner):
            yield


def _read(owner: Path) -> dict[str, Any]:
    """Returns the last owner; {} where there was none, or where the file is incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(owner.read_text()))
    return {}


def _lives(owner: Path, last: dict[str, Any], lock: str) -> bool:
    """Returns whether the last owner still runs, by its process on this host, by its heartbeat on another."""
    if last.get("host") == socket.gethostname() and last.get("boot") == _boot():
        return _running(last)
    os.utime(lock)  # by the file system's clock, since the hosts' clocks may differ
    before, now = _beat(owner), _beat(Path(lock))
    if before is None or (now is not None and now - before > SILENT_S):
        return False
    _log.warning("waits %g s for a sign of life of %s", SILENT_S, _named(last))
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_S / 2, 1.0))
        if _beat(owner) != before:
            return True
    return False


def _running(last: dict[str, Any]) -> bool:
    """Returns whether the owner's process runs here; one with its number that began at another time is another process."""
    pid = last.get("pid")
    return isinstance(pid, int) and pid != os.getpid() and _began(pid) is not None and _began(pid) == last.get("began")


def _began(pid: int) -> str | None:
    """Returns when a process of this host began, in ticks since boot; None where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _boot() -> str:
    """Returns the id of this host's boot, since containers are more likely to share a host's name than its boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _beat(owner: Path) -> float | None:
    with contextlib.suppress(OSError):
        return owner.stat().st_mtime
    return None


@contextlib.contextmanager
def _beating(owner: Path) -> Iterator[None]:
    """Records this process as the owner and beats while the block runs; a deleted folder is ignored."""
    known = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "began": _began(os.getpid())}
    since = datetime.now(UTC).isoformat(timespec="seconds")
    replace_text(owner, json.dumps({**known, "since": since}))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(owner)

    thread = threading.Thread(target=beat, daemon=True, name="run lock")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        owner.unlink(missing_ok=True)


def _named(last: dict[str, Any]) -> str:
    if not last:
        return "another process"
    return f"process {last.get('pid')} on {last.get('host')}, which began at {last.get('since')}"


def _held(folder: Path, last: dict[str, Any], macro: str) -> str:
    return f"{_named(last)} is writing to {folder}: wait for it, stop it, or set {macro} to another folder"
