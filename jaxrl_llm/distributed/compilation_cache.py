"""Keeps compiled programs between starts, in the user's cache folder: every command that compiles calls `keep` first.

Each folder is of one version of JAX and of its plugins on one kind of machine: programs for CPUs contain the instructions of
the one that compiled them. JAX's own key adds the program, XLA's flags and the accelerator. JAX's own variables take precedence:
JAX_COMPILATION_CACHE_DIR names another folder, and JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.

Of the processes of a run, JAX lets process 0 alone write, and the key of a program that spans them is the same in all. So the
other hosts find programs in a folder that every host sees, and compile anew at each start in folders of their own. The variable
JAXRL_LLM_COMPILED names such a folder, mounted or in object storage (gs://BUCKET/PATH).
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import stat
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports JAX, whose variables are set here first
    from jaxrl_llm.distributed.processes import Processes

DIR, ENABLE = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
SHARED = "JAXRL_LLM_COMPILED"
LEAST_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
FOLDERS = ("jaxrl_llm", "jax")
LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}  # the libraries with which JAX reads object storage
NOT_KEPT = "compiled programs are not kept between starts"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
UNREAD_S = 30 * 24 * 3600.0  # seconds without a read after which a program is deleted
OFF = ("0", "false", "no", "off", "n", "f")


def keep() -> None:
    """Keeps the programs that this process and its children compile; where that is impossible, prints why on standard error."""
    already = os.environ.get(DIR)
    if problem := apply():
        print(f"warning: {problem}", file=sys.stderr)
    jax = sys.modules.get("jax")
    if jax is not None and os.environ.get(DIR) != already:  # it read its variables when it was imported
        jax.config.update("jax_compilation_cache_dir", os.environ[DIR])
        if LEAST_S in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", float(os.environ[LEAST_S]))


def apply(environment: MutableMapping[str, str] | None = None) -> str:
    """Sets JAX's variables in `environment` (the process's own by default), and deletes programs that were not read for long.

    Returns:
      The reason why no programs are kept although the user did not ask for that; "" where they are.
    """
    environment = os.environ if environment is None else environment
    if DIR in environment or environment.get(ENABLE, "true").strip().lower() in OFF:
        return ""
    shared = environment.get(SHARED, "")
    if "://" in shared:
        return _in_storage(shared, environment)
    base = home(environment)
    folder = base / machine()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(base, folder)
        trim(base, time.time())
    except OSError as error:
        return f"{NOT_KEPT}: {error}; set {SHARED if shared else DIR} to a folder of your own"
    environment[DIR] = str(folder)
    environment.setdefault(LEAST_S, "0")  # small programs take most of a start
    return ""


def alone(processes: "Processes") -> str:
    """Returns a warning where processes do not see process 0's folder, and so compile anew at each start; "" where all see it.

    All processes of the run call it together, each after its own `apply`.
    """
    folder = os.environ.get(DIR, "")
    kept = bool(folder) and "://" not in folder and os.environ.get(ENABLE, "true").strip().lower() not in OFF
    if kept and processes.main:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
        kept = os.access(folder, os.W_OK)
    if not all(processes.gathered(kept)):
        return ""  # in object storage, or each has said why, or was asked to keep nothing
    blind = processes.blind(Path(folder))
    if not blind:
        return ""
    return (
        f"{len(blind)} of {processes.count} processes compile anew at each start ({', '.join(map(processes.named, blind[:4]))}"
        f"{', ...' if blind[4:] else ''}): process 0 alone keeps compiled programs, and they do not see its {folder}; set {SHARED} on "
        "all hosts to a folder that they share, mounted or in object storage (gs://BUCKET/PATH)"
    )


def _in_storage(address: str, environment: MutableMapping[str, str]) -> str:
    """Keeps programs in object storage if they took JAX's own threshold to compile, since a request takes longer than most do; returns as `apply`."""
    scheme = address.partition("://")[0]
    library = LIBRARIES.get(scheme)
    if library is None:
        return f"{NOT_KEPT}: {SHARED}={address} is of no kind that is known: use {', '.join(f'{s}://' for s in LIBRARIES)} or a folder"
    if not importlib.util.find_spec(library):
        return f"{NOT_KEPT}: {SHARED}={address} is read by {library}, which is not installed: pip install {library}"
    environment[DIR] = "/".join([address.rstrip("/"), *FOLDERS, machine()])
    return ""


def home(environment: Mapping[str, str]) -> Path:
    """Returns the folder that holds the folders of all machines."""
    base = (
        environment.get(SHARED)
        or environment.get("XDG_CACHE_HOME")
        or Path(environment.get("HOME") or Path.home()) / ".cache"
    )
    return Path(base).joinpath(*FOLDERS)


def machine() -> str:
    """Returns the name of this machine's folder: versions, and a hash of the processor's model and features."""
    parts = [platform.machine(), platform.libc_ver()[1], *_processor()]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package}={importlib.metadata.version(package)}")
    code = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"jax-{importlib.metadata.version('jax')}-{platform.system().lower()}-{platform.machine()}-{code}"


def _processor(file: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Returns the lines of `file` that name the first processor and its features; without the file, the system's name for it."""
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = file.read_text().split("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.partition(":")[0].strip() in names]


def _check_owner(*folders: Path) -> None:
    """Raises PermissionError where others could put programs into a folder, since this user would run them."""
    for folder in folders:
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} is not of this user, or others may write to it")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")


def trim(base: Path, now: float) -> None:
    """Deletes programs that were neither read nor written for UNREAD_S seconds, and folders that are empty by that.

    A folder that holds nothing otherwise may be of a start that still compiles its first program.
    """
    left = set()
    for file in base.glob("*/*"):
        with contextlib.suppress(OSError):  # another start deletes it too
            found = file.stat()
            if file.is_file() and now - max(found.st_atime, found.st_mtime) > UNREAD_S:
                file.unlink()
                left.add(file.parent)
    for folder in left - {base / machine()}:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()
