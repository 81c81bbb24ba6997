"""Lists the system calls that a verifier or a sandboxed program may make; the kernel refuses every other one (Linux).

Verifiers of other packages hand answers to Python's evaluator (sympy's parser and several of reasoning-gym's scorers do), so an
answer can be a program. After `confine` the process can open no socket, start no program and no process, change no file and
signal nobody. It can still read what its user may read; all that leaves it is the answer on its pipe.

libseccomp (through pyseccomp) makes the filters; only the choice of calls is the project's own.
"""

import errno
import resource
from typing import Any

# Calls that an interpreter needs to read and to compute. A name that an architecture does not have is left out there.
COMPUTES = [
    "read",
    "readv",
    "pread64",
    "preadv",
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "close",
    "close_range",
    "lseek",
    "fstat",
    "newfstatat",
    "statx",
    "stat",
    "lstat",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
    "getdents64",
    "getcwd",
    "statfs",
    "fstatfs",
    "dup",
    "dup2",
    "dup3",
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_create",
    "epoll_create1",
    "epoll_ctl",
    "epoll_wait",
    "epoll_pwait",
    "eventfd2",
    "pipe",
    "pipe2",
    "brk",
    "munmap",
    "mprotect",
    "mremap",
    "madvise",
    "msync",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "rt_sigtimedwait",
    "rt_sigsuspend",
    "rt_sigpending",
    "sigaltstack",
    "futex",
    "set_robust_list",
    "rseq",
    "set_tid_address",
    "membarrier",
    "arch_prctl",
    "sched_yield",
    "sched_getaffinity",
    "getcpu",
    "clock_gettime",
    "clock_getres",
    "clock_nanosleep",
    "nanosleep",
    "gettimeofday",
    "time",
    "times",
    "getrusage",
    "getrlimit",
    "sysinfo",
    "uname",
    "getrandom",
    "getpid",
    "gettid",
    "getppid",
    "getuid",
    "geteuid",
    "getgid",
    "getegid",
    "getgroups",
    "getresuid",
    "getresgid",
    "getpgrp",
    "getpgid",
    "getsid",
    "exit",
    "exit_group",
    "restart_syscall",
    "wait4",
    "waitid",
    "setitimer",
    "getitimer",
    "alarm",
    "umask",
    "chdir",
    "fchdir",
    "fadvise64",
]
# Further calls of a sandboxed program, which can reach nothing but its own folder and processes.
RUNS = [
    "fork",
    "vfork",
    "execve",
    "setsid",
    "setpgid",
    "open",
    "openat",
    "creat",
    "mkdir",
    "mkdirat",
    "rmdir",
    "unlink",
    "unlinkat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "truncate",
    "ftruncate",
    "fallocate",
    "fsync",
    "fdatasync",
    "setrlimit",
    "sendfile",
    "copy_file_range",
    "sendto",
    "recvfrom",
    "shutdown",
    "getsockname",
    "getpeername",
    "getsockopt",
]
SIGNALS = ("kill", "tkill", "tgkill")
# Landlock does not look at these, so they are left to programs that have a file system of their own.
ATTRIBUTES = ["chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat"]
# Libraries fall back where these do not exist, but take a refusal for a failure.
ABSENT = ("clone3", "openat2", "fchmodat2", "pidfd_open")

CHANGES = 0o1 | 0o2 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
TMPFILE = 0o20000000
THREAD = 0x10000  # CLONE_THREAD
# CLONE_PARENT, and the namespaces of mounts, control groups, host name, IPC, users, processes and network.
NEW_ROOMS = 0x8000 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
SHARED, ANONYMOUS, HUGE = 0x01, 0x20, 0x40000
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicates, flags, locks of files, the size of a pipe
IOCTLS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, its size, bytes to read, blocking, close on exec
PRCTLS = (3, 15, 16, 0x53564D41)  # reads whether it can be dumped; its thread's name; names of memory
UNIX, STREAM, KIND = 1, 1, 0xF


def confine() -> None:
    """Confines this process for good, as verifiers are.

    Raises:
      OSError: the kernel does not allow it, or libseccomp is missing.
    """
    found = verifiers()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found.load()


def verifiers() -> Any:
    """Returns the filter of a process that may read and compute; `load` sets it for the calling thread and all that it starts."""
    made, arg, allow = _filter(COMPUTES)
    kept = seccomp()
    for call, place in (("open", 1), ("openat", 2)):
        _add(made, allow, call, arg(place, kept.MASKED_EQ, CHANGES, 0))
    _add(made, allow, "clone", arg(0, kept.MASKED_EQ, THREAD | NEW_ROOMS, THREAD))
    return made


def programs(*, own_files: bool, signals: bool) -> Any:
    """Returns the filter of a sandboxed program.

    Args:
      own_files: whether the program has a file system of its own, so that it may change attributes, and remove what it made.
      signals: whether signals reach its own processes alone, so that it may send them.
    """
    made, arg, allow = _filter(COMPUTES)
    kept = seccomp()
    for call in RUNS:
        place = {"open": 1, "openat": 2}.get(call)
        if place is not None and not own_files:  # a file without a name could not be counted
            _add(made, allow, call, arg(place, kept.MASKED_EQ, TMPFILE, 0))
        else:
            _add(made, allow, call)
    for call in (*(SIGNALS if signals else ()), *(ATTRIBUTES if own_files else ())):
        _add(made, allow, call)
    _add(made, allow, "clone", arg(0, kept.MASKED_EQ, NEW_ROOMS, 0))
    # Streams can be connected to no other process; datagrams could be sent to any socket that has a name.
    _add(made, allow, "socketpair", arg(0, kept.EQ, UNIX), arg(1, kept.MASKED_EQ, KIND, STREAM))
    return made


def judges() -> Any:
    """Returns the filter of the process that holds hidden tests, which reads, computes, and starts nothing."""
    return verifiers()


def _filter(calls: list[str]) -> tuple[Any, Any, int]:
    """Returns (filter, its Arg, its ALLOW) that allows `calls` with any arguments, and the calls that both kinds of process share."""
    kept = seccomp()
    made, arg, allow = kept.SyscallFilter(kept.ERRNO(errno.EPERM)), kept.Arg, kept.ALLOW
    made.set_attr(kept.Attr.ACT_BADARCH, kept.KILL_PROCESS)  # calls numbered for another architecture
    for call in calls:
        _add(made, allow, call)
    for call in ABSENT:
        _add(made, kept.ERRNO(errno.ENOSYS), call)
    for call, place, values in (("fcntl", 1, FCNTLS), ("ioctl", 1, IOCTLS), ("prctl", 0, PRCTLS)):
        for value in values:
            _add(made, allow, call, arg(place, kept.EQ, value))
    for call in ("prlimit64", "sched_setaffinity"):  # for this process alone
        _add(made, allow, call, arg(0, kept.EQ, 0))
    # Shared memory without a file would be memory that no process of a run seems to hold.
    for refused, value in ((SHARED | HUGE, 0), (SHARED | ANONYMOUS | HUGE, SHARED)):
        _add(made, allow, "mmap", arg(3, kept.MASKED_EQ, refused, value))
    return made, arg, allow


def _add(made: Any, action: int, call: str, *conditions: Any) -> None:
    """Adds a rule, unless this architecture has no such call, or libseccomp does not know it; then the call stays refused."""
    kept = seccomp()
    number = kept.resolve_syscall(kept.Arch.NATIVE, call)
    if number >= 0:
        made.add_rule(action, number, *conditions)


def seccomp() -> Any:
    """Returns pyseccomp; raises OSError where it or libseccomp is missing, which says what to install."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise OSError(
            errno.ENOSYS,
            f"untrusted programs need libseccomp ({error}): apt-get install libseccomp2, pip install pyseccomp",
        ) from error
    return pyseccomp
