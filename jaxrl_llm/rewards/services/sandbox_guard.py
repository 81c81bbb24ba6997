"""The program that holds runs of untrusted Python: builds their room, starts them, ends them (Linux; standard library only).

Jobs come one at a time as lines of JSON on standard input, outcomes go as lines of JSON to standard output. Each job has a
process of its own, a copy of this one, which starts the run as a fresh interpreter: no run sees what this process holds,
nor what an earlier run left. Where the kernel lets it, the run has namespaces of its own (mounts, processes, network): its root is a small memory disk with the interpreter and the
system's libraries read-only, so it sees no other file and no other process. Elsewhere it has an empty folder. In both
cases it loses its privileges, gets resource limits, and a filter of system calls that refuses sockets.

An assertion runs in the process of the program it tests: a program written to deceive the test can. One that is tested
by its output cannot.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import resource
import secrets
import select
import signal
import struct
import sys
import time

# What the interpreter of the run executes; descriptor 3 brings the program, 4 takes the verdict. It has few imports and
# reads no .pth files, which are most of the time that an interpreter takes to start.
BOOT = """
import os, site, sys
def main():
    with os.fdopen(3, "rb") as source:
        word, size, tested = source.readline().split()
        program = source.read(int(size)).decode("utf-8", "surrogatepass")
        test = source.read().decode("utf-8", "surrogatepass") if int(tested) else None
    site.setquit(), site.setcopyright(), site.sethelper()
    sys.path += site.getsitepackages()
    scope, stage = {"__name__": "__main__" if test is None else "program"}, "program"
    status, detail = "passed", ""
    try:
        exec(compile(program, "program.py", "exec"), scope)
        stage = "test"
        if test is not None:
            exec(compile(test, "test.py", "exec"), scope)
    except SystemExit as error:
        if test is not None or error.code not in (None, 0):
            status, detail = "error", f"exited with {error.code!r} in the {stage}"
    except MemoryError:
        status, detail = "memory", f"out of memory in the {stage}"
    except BaseException as error:
        status = "failed" if stage == "test" and isinstance(error, AssertionError) else "error"
        detail = f"{type(error).__name__} in the {stage}: {error}"
    try:
        sys.stdout.flush()
    except OSError as error:
        status, detail = "error", f"output: {error}"
    os.write(4, b"\\n".join([word, status.encode(), detail[:2000].encode("utf-8", "replace")]))
    os._exit(0)
main()
"""

MOUNT_READONLY, MOUNT_NOSUID, MOUNT_PRIVATE, MOUNT_RECURSIVE, MOUNT_BIND = 1, 2, 1 << 18, 1 << 14, 1 << 12
NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
SET_DEATH_SIGNAL, SET_SECCOMP, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 22, 36, 38
SYS_MOUNT_SETATTR = 442  # the same on every architecture
# Of each architecture: its audit number, pivot_root, and the system calls that are refused: socket, ptrace, unshare,
# setns, mount, umount2, chroot, bpf, add_key, keyctl, process_vm_readv and writev, perf_event_open, userfaultfd; and
# io_uring_setup, by which sockets could be had.
ARCHITECTURES = {
    "x86_64": (0xC000003E, 155, (41, 101, 272, 308, 165, 166, 161, 321, 248, 250, 310, 311, 298, 323, 425)),
    "aarch64": (0xC00000B7, 41, (198, 117, 97, 268, 40, 39, 51, 280, 217, 219, 270, 271, 241, 282, 425)),
}
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of libc; raises OSError where it fails."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def separate(user: int) -> None:
    """Leaves the machine's namespaces; one who is not root does so through a user namespace of their own."""
    group = os.getgid()
    call("unshare", NEW_MOUNT | NEW_PID | NEW_NET | NEW_IPC | (0 if user == 0 else NEW_USER))
    if user != 0:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def build_root(folder: str, paths: list[str], disk: int) -> None:
    """Makes `folder` a memory disk with `paths` of the machine read-only, and the root of this process."""
    call("mount", b"none", b"/", None, MOUNT_PRIVATE | MOUNT_RECURSIVE, None)
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", MOUNT_NOSUID, f"size={disk},nr_inodes=4096,mode=755".encode())
    for path in [*paths, "/dev/null", "/dev/zero", "/dev/urandom"]:
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
    call("syscall", ARCHITECTURES[platform.machine()][1], b".", b".")
    call("umount2", b".", 2)  # detaches the old root, which lies under the new one
    os.chdir("/box")


def refuse_calls() -> None:
    """A filter under which the refused system calls fail with EPERM, for this process and all it starts."""
    audit, _, refused = ARCHITECTURES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    count = len(refused)
    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    program.append((at_least, count + 1, 0, 0x40000000))  # another numbering of the same calls
    program += [(equal, count - i, 0, number) for i, number in enumerate(refused)]
    program += [(give, 0, 0, allow), (give, 0, 0, deny)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    kept = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(kept))
    call("prctl", SET_SECCOMP, 2, header, 0, 0)


def give_up(job: dict, user: int) -> None:
    """Drops privileges for good and sets the limits of the run."""
    call("prctl", SET_SUBREAPER, 0, 0, 0, 0)
    if user == 0:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    processes = job["processes"]
    if user != 0 and job["isolation"] != "namespaces":
        processes += tasks_of(user)  # the limit counts what else runs under this user
    seconds = math.ceil(job["limit_s"]) + 1
    for kind, limit in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_FSIZE, job["disk"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    if platform.machine() in ARCHITECTURES:
        refuse_calls()


def tasks_of(user: int) -> int:
    """Threads that run under a user."""
    total = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{entry}").st_uid == user:
                total += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return total


def begin(job: dict, user: int, word: str, ends: dict[int, int]) -> None:
    """In the process of the run: takes the prepared descriptors, shuts itself in, and becomes the interpreter."""
    try:
        os.setsid()  # signals to its process group reach nobody else
        held = {number: os.dup(end) for number, end in ends.items()}  # above any number that is set next
        if job["isolation"] == "namespaces":
            build_root(job["folder"], job["paths"], job["disk"])
        else:
            os.chdir(job["folder"])
        for number, end in held.items():
            os.dup2(end, number)
        os.closerange(5, 1024)
        give_up(job, user)
        home = os.getcwd()
        environment = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        os.execve(job["python"], [job["python"], "-I", "-S", "-B", "-c", BOOT], environment)
    except BaseException as error:
        os.write(ends[4] if "held" not in locals() else held[4], f"{word}\nsetup\n{error}".encode())
    finally:
        os._exit(97)


def follow(child: int, ends: dict[int, int], job: dict) -> tuple[dict[int, bytes], str]:
    """What comes from descriptors 1, 2 and 4 of the run until it ends, and why it was ended, if it was."""
    got, most = dict.fromkeys(ends, b""), {1: job["output"], 2: job["output"], 4: 65536}
    watch = os.pidfd_open(child)
    deadline = time.monotonic() + job["limit_s"]
    numbers = {end: number for number, end in ends.items()}
    open_ends = set(numbers)
    ended, reason = False, ""
    while open_ends or not ended:
        left = deadline - time.monotonic()
        if left <= 0 and not ended:
            return got, "timeout"
        ready, _, _ = select.select([*open_ends, *([] if ended else [watch])], [], [], 0.2 if ended else left)
        if ended and not ready:
            return got, reason  # a descendant that outlived the run holds the descriptor
        for end in ready:
            if end == watch:
                ended = True
                continue
            data = os.read(end, 65536)
            number = numbers[end]
            got[number] += data
            if not data:
                open_ends.discard(end)
            elif len(got[number]) > most[number]:
                return got, "output"
    return got, reason


def end_all(child: int, job: dict, user: int) -> int:
    """Ends the run and whatever it started; the exit status of the run."""
    status = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    if job["isolation"] == "namespaces":  # where its first process ends, all of it does
        return os.waitpid(child, 0)[1]
    if user == 0:
        helper = os.fork()
        if helper == 0:
            os.setresuid(job["uid"], job["uid"], job["uid"])
            os.kill(-1, signal.SIGKILL)  # all processes of that user, at one moment
            os._exit(0)
        os.waitpid(helper, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # orphans come to this process
        with open(f"/proc/self/task/{os.getpid()}/children") as orphans:
            for orphan in orphans.read().split():
                os.kill(int(orphan), signal.SIGKILL)
        try:
            gone, found = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = found if gone == child else status
    return status


def outcome(job: dict) -> dict:
    """Runs the job and says what came of it."""
    user, word = os.getuid(), secrets.token_hex(16)
    source = os.memfd_create("job")
    given = os.memfd_create("stdin")
    program, test, stdin = ((job[name] or "").encode("utf-8", "surrogatepass") for name in ("program", "test", "stdin"))
    header = f"{word} {len(program)} {int(job['test'] is not None)}\n".encode()
    for descriptor, text in ((source, header + program + test), (given, stdin)):
        with os.fdopen(os.dup(descriptor), "wb") as out:
            out.write(text)
        os.lseek(descriptor, 0, 0)
    pipes = {number: os.pipe() for number in (1, 2, 4)}
    call("prctl", SET_SUBREAPER, 1, 0, 0, 0)
    if job["isolation"] == "namespaces":
        separate(user)
    elif user == 0:
        os.chown(job["folder"], job["uid"], job["uid"])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # with whom this is a copy of
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        begin(job, user, word, {0: given, 3: source} | {number: pipe[1] for number, pipe in pipes.items()})
    for _, end in pipes.values():
        os.close(end)
    got, reason = follow(child, {number: pipe[0] for number, pipe in pipes.items()}, job)
    seconds = time.monotonic() - began
    status = end_all(child, job, user)
    said = verdict(got[4], word)
    if reason:
        status_word, detail = reason, {"timeout": "out of time", "output": "too much output"}[reason]
    elif said is not None:
        status_word, detail = said
    else:
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        status_word = "timeout" if by_signal == signal.SIGXCPU else "error"
        detail = f"ended early ({f'signal {by_signal}' if by_signal else f'exit code {os.WEXITSTATUS(status)}'})"
        detail += ": " + got[2].decode(errors="replace")[-500:] if got[2] else ""
    return {"status": status_word, "detail": detail, "seconds": seconds, "stdout": got[1].decode(errors="replace")}


def verdict(text: bytes, word: str) -> tuple[str, str] | None:
    """(status, detail) that the run's own interpreter gave, known by the word it was given; None without one."""
    given, _, rest = text.decode(errors="replace").partition("\n")
    status, _, detail = rest.partition("\n")
    return (status, detail) if given == word else None


def main() -> None:
    """Holds a run for each line of standard input, until that ends."""
    for line in sys.stdin.buffer:
        guard = os.fork()
        if guard == 0:
            try:
                found = outcome(json.loads(line))
            except OSError as error:
                found = {"status": "setup", "detail": str(error), "seconds": 0.0, "stdout": ""}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(guard, 0)[1]:
            os._exit(1)  # nobody answers for this job


if __name__ == "__main__":
    main()
