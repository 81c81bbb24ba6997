"""Shuts a process in that looks at what a model wrote: it can read and compute, and nothing else (Linux).

Verifiers of other packages hand answers to Python's evaluator (sympy's parser, several of reasoning-gym's scorers), so an answer
can be a program. After `confine` the process can open no socket, start no program and no process, change no file and signal
nobody. It still can read what its user may read; all that leaves it is the answer on its pipe.
"""

import ctypes
import errno
import platform
import resource
import struct

from jaxrl_llm.rewards.services.sandbox_guard import ARCHITECTURES, SET_NO_NEW_PRIVILEGES, SET_SECCOMP, call

LOAD, EQUAL, AT_LEAST, ANY_BIT, GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
CHANGES = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
THREAD = 0x10000  # CLONE_THREAD
# Beside those that the sandbox refuses: execve, execveat, kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal,
# pidfd_getfd, truncate, ftruncate, renameat, renameat2, unlinkat, mkdirat, linkat, symlinkat, mknodat, fchmod, fchmodat, fchmodat2,
# fchown, fchownat, openat2; and on x86_64 fork, vfork, creat, rename, unlink, rmdir, mkdir, link, symlink, mknod, chmod, chown, lchown.
REFUSED = {
    "x86_64": (59, 322, 62, 200, 129, 297, 424, 438, 76, 77, 264, 316, 263, 258, 265, 266, 259, 91, 268, 452, 93, 260, 437,
               57, 58, 85, 82, 87, 84, 83, 86, 88, 133, 90, 92, 94),
    "aarch64": (221, 281, 129, 130, 138, 240, 424, 438, 45, 46, 38, 276, 35, 34, 37, 36, 33, 52, 53, 452, 55, 54, 437),
}  # fmt: skip
# (number, argument) of open and openat, and of clone; clone3 hides its flags in memory.
OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435

Instruction = tuple[int, int, int, int]


def confine() -> None:
    """Shuts this process in for good.

    Raises:
      OSError: the kernel does not let it, or the processor is of a kind that is not known here.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls of {machine} are not known; known are {sorted(ARCHITECTURES)}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    program = rules(machine)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    kept = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(kept))
    call("prctl", SET_SECCOMP, 2, header, 0, 0)


def rules(machine: str) -> list[Instruction]:
    """The filter's program, in the kernel's BPF: blocks that each decide about one call, or go on to the next block."""
    audit, _, sandboxed = ARCHITECTURES[machine]
    refuse = REFUSE | errno.EPERM
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, 0x40000000), (GIVE, 0, 0, refuse)]  # another numbering of the same calls
    for number in (*sandboxed, *REFUSED[machine]):
        program += [(EQUAL, 0, 1, number), (GIVE, 0, 0, refuse)]
    for number, argument in OPENS[machine]:
        program += [(EQUAL, 0, 4, number), (LOAD, 0, 0, 16 + 8 * argument), (ANY_BIT, 0, 1, CHANGES)]
        program += [(GIVE, 0, 0, refuse), (GIVE, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 4, CLONE[machine]), (LOAD, 0, 0, 16), (ANY_BIT, 1, 0, THREAD)]
    program += [(GIVE, 0, 0, refuse), (GIVE, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 1, CLONE3), (GIVE, 0, 0, REFUSE | errno.ENOSYS)]  # libraries then ask by clone
    return [*program, (GIVE, 0, 0, ALLOW)]
