"""Builds the sandbox of an untrusted program from namespaces or Landlock, and dropped privileges (Linux).

The project has code of its own for this because bubblewrap and nsjail start anew for each run (a kept guard starts one in about
20 ms), bound neither the memory nor the processes of a tree, and cannot work where namespaces are refused, as Landlock can.
"""

import ctypes
import os
import platform
import resource
import signal
import struct

from jaxrl_llm.rewards.services import confine
from jaxrl_llm.rewards.services.untrusted import process_tree

MOUNT_READONLY, MOUNT_NOSUID, MOUNT_PRIVATE, MOUNT_RECURSIVE, MOUNT_BIND = 1, 2, 1 << 18, 1 << 14, 1 << 12
NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 4, 36, 38
SYS_MOUNT_SETATTR = 442  # the same on every architecture, as those of Landlock are
SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
DEVICES = ("/dev/null", "/dev/urandom")  # /dev/zero would give memory that no process seems to hold
NOBODY = 65534
# Bits of /proc/self/status.
CHOWN, KILL, SET_GROUP, SET_USER, ADMIN = 1 << 0, 1 << 5, 1 << 6, 1 << 7, 1 << 21
# Rights of Landlock.
EXECUTE, WRITE, READ, READ_FOLDER, MAKE_FOLDER, MAKE_FILE, MAKE_LINK, TRUNCATE = 1, 2, 4, 8, 128, 256, 4096, 16384
LEAST_LANDLOCK, SCOPED_LANDLOCK = 3, 6  # the first version that guards truncation; the first that confines signals

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Calls a function of libc; raises OSError where it fails."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def capabilities() -> int:
    """Returns the capabilities that this process can use, as bits."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))


def can_change_user() -> bool:
    """Returns whether a run can be given a user of its own, and be ended nevertheless."""
    needed = CHOWN | KILL | SET_GROUP | SET_USER
    return capabilities() & needed == needed


def separate(*, processes: bool) -> bool:
    """Leaves the machine's namespaces; a process that may not do so directly gets a user namespace first.

    Args:
      processes: True takes namespaces of processes, network and IPC, for its children; False one of files. A program takes that of files
        itself: a new root applies to all processes that share it, and the process that watches the program needs the machine's.

    Returns:
      Whether users can be changed in there.
    """
    kinds = NEW_PID | NEW_NET | NEW_IPC if processes else NEW_MOUNT
    if capabilities() & ADMIN and can_change_user():
        call("unshare", kinds)
        return True
    user, group = os.getuid(), os.getgid()
    call("unshare", kinds | NEW_USER)
    maps = (
        ("setgroups", "deny"),
        ("uid_map", f"{user or NOBODY} {user} 1"),
        ("gid_map", f"{group or NOBODY} {group} 1"),
    )
    for file, text in maps:
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    return False


def build_root(folder: str, paths: list[str], disk: int) -> None:
    """Makes `folder` a memory disk of `disk` bytes with `paths` of the machine read-only, and the root of this process."""
    call("mount", b"none", b"/", None, MOUNT_PRIVATE | MOUNT_RECURSIVE, None)
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", MOUNT_NOSUID, f"size={disk},nr_inodes=4096,mode=755".encode())
    for path in [*paths, *DEVICES]:
        inside = folder + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.symlink(os.readlink(path), inside)
        elif os.path.exists(path) and not os.path.exists(inside):
            os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
            if not os.path.isdir(path):
                os.close(os.open(inside, os.O_CREAT, 0o644))
            call("mount", path.encode(), inside.encode(), None, MOUNT_BIND | MOUNT_RECURSIVE, None)
            flags = struct.pack("QQQQ", MOUNT_READONLY | MOUNT_NOSUID, 0, 0, 0)
            call("syscall", SYS_MOUNT_SETATTR, -100, inside.encode(), 0x8000, flags, len(flags))
    for place in ("/box", "/tmp"):  # nosec B108
        os.mkdir(folder + place)
        os.chmod(folder + place, 0o777)  # nosec B103
    os.chdir(folder)
    call("syscall", SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", 2)  # detaches the old root, which lies under the new one
    os.chdir("/box")


def landlock_version() -> int:
    """Returns the version of Landlock that the kernel has; 0 without it."""
    try:
        return call("syscall", SYS_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def landlock(reads: list[str], writes: str) -> None:
    """Restricts this process to `reads`, to read and to execute, and the folder `writes`, where files can be made but not removed.

    Files that cannot be removed can be counted. The processes of this one can neither trace nor, from version 6 on, signal others.

    Raises:
      OSError: the kernel has no Landlock of version 3 or newer.
    """
    version = landlock_version()
    if version < LEAST_LANDLOCK:
        raise OSError(f"the kernel has Landlock's version {version}, at least {LEAST_LANDLOCK} (Linux 6.2) is needed")
    files = (1 << (16 if version >= 5 else 15)) - 1
    attributes = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < SCOPED_LANDLOCK else 24]
    ruleset = call("syscall", SYS_CREATE_RULESET, attributes, len(attributes), 0)
    rules = [(path, EXECUTE | READ | READ_FOLDER) for path in reads]
    rules += [("/dev/null", READ | WRITE | TRUNCATE), ("/dev/urandom", READ)]
    rules += [(writes, READ | READ_FOLDER | WRITE | TRUNCATE | MAKE_FILE | MAKE_FOLDER | MAKE_LINK)] if writes else []
    for path, rights in rules:
        if not os.path.exists(path):
            continue
        rights &= ~READ_FOLDER if not os.path.isdir(path) else -1
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call("syscall", SYS_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("syscall", SYS_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def drop_privileges(user: int | None) -> None:
    """Becomes `user`, where one is given, and gives up every capability for good."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("syscall", SYS_CAPSET[platform.machine()], header, none)
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # a change of user resets it
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def limit(job: dict, processes: int) -> None:
    """Sets the limits of one process of the run; the guard keeps those of the whole tree."""
    for kind, most in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_FSIZE, job["disk"]),
        (resource.RLIMIT_CPU, int(job["limit_s"]) + 2),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def shut_program_in(job: dict, changes_user: bool) -> None:
    """Isolates this process before it becomes the interpreter of the program; the current folder is then its own.

    Args:
      changes_user: whether it can become the user `job["uid"]`.
    """
    isolation = job["isolation"]
    if isolation == "namespaces":
        call("unshare", NEW_MOUNT)
        build_root(job["folder"], job["paths"], job["disk"])
    else:
        os.chdir(job["folder"])
    found = confine.programs(
        own_files=isolation != "landlock",
        signals=isolation != "landlock" or landlock_version() >= SCOPED_LANDLOCK,
    )
    # Where users are shared, the limit counts what else runs under this one, which may grow meanwhile; the guard keeps the run's own number.
    shared = not changes_user and isolation != "namespaces"
    processes = job["processes"] if not shared else 2 * job["processes"] + process_tree.tasks_of(os.getuid())
    call("prctl", SET_SUBREAPER, 0, 0, 0, 0)
    drop_privileges(job["uid"] if changes_user else None)
    if isolation == "landlock":
        landlock(job["paths"], job["folder"])
    limit(job, processes)
    found.load()


def shut_judge_in(job: dict) -> None:
    """Isolates this process, which holds hidden tests: other processes of its user cannot look into it."""
    changes_user = can_change_user()
    if job["isolation"] == "namespaces":
        changes_user = separate(processes=False)
        build_root(job["folder"], job["judge_paths"], 1 << 20)
    found = confine.judges()
    drop_privileges(job["uid"] + 1 if changes_user else None)
    if job["isolation"] == "landlock":
        landlock(job["judge_paths"], "")
    resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_CPU, (int(job["limit_s"]) + 2,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # last, as a change of user sets it, and a namespace needs it
    found.load()
