"""Programs that attack the sandbox, one a test, in every isolation that is offered without asking for a weak one, as each kind of user.

Each test runs an attack and, beside it, an honest program that does the harmless half of the same thing: a wall that stops both would
be no sandbox. The attacks run in a process of their own that has become the user, so they run as root, as root without
capabilities (as in a container that drops them all) and as `nobody`.
"""

import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from sandbox_attack import (
    DISK_MB,
    MEMORY_MB,
    NOBODY,
    PROCESSES,
    SECRET,
    Attack,
    NotOffered,
    attack,
    attacked,
    printed,
    refused,
)  # fmt: skip

__all__ = ["attack"]  # a fixture

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),
]

# -- memory: of the whole tree, of every kind --------------------------------------------------------------------------------

HOLDS = "import time\ntime.sleep(5)\n"
HALF = MEMORY_MB // 2


def test_memory_of_one_process_is_limited(attack: Attack) -> None:
    assert attack(f"x = bytearray({2 * MEMORY_MB} << 20)")[0] == "memory"
    assert printed(attack, f"x = bytearray({HALF} << 20)\nprint(len(x) >> 20)") == f"{HALF}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")
def test_others_of_a_shared_user_may_start_while_a_program_runs() -> None:
    """The kernel's limit counts all of a user's processes, and the guard keeps the number of the run's own."""
    program = "import os, time\ntime.sleep(2)\nfor _ in range(4):\n    if os.fork() == 0: os._exit(0)\nfor _ in range(4): os.wait()\nprint('forked')"
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        try:
            attack = stack.enter_context(attacked(NOBODY, "landlock"))
        except NotOffered as why:
            pytest.skip(str(why))
        outcome = thread.submit(printed, attack, program)
        time.sleep(1)
        others = [stack.enter_context(subprocess.Popen([*NOBODY, "sleep", "60"])) for _ in range(PROCESSES - 2)]
        try:
            assert outcome.result() == "forked\n"
        finally:
            for other in others:
                other.kill()


def test_memory_of_all_processes_counts_together(attack: Attack) -> None:
    """Each child stays far below the limit of one; honest children that share what their parent read are not counted twice."""
    program = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (80 << 20); time.sleep(20); os._exit(0)\ntime.sleep(20)"
    assert attack(program)[0] == "memory"
    shared = f"import os, time\nx = bytearray(b'x') * ({HALF} << 20)\nfor _ in range(4):\n    if os.fork() == 0:\n        time.sleep(0.3); os._exit(0)\nfor _ in range(4): os.wait()\nprint('shared')"
    assert printed(attack, shared) == "shared\n"


def test_orphans_in_sessions_of_their_own_count_too(attack: Attack) -> None:
    program = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n        x = bytearray(b'x') * (90 << 20); time.sleep(20)\ntime.sleep(20)"
    assert attack(program)[0] == "memory"


def test_memory_without_a_process_is_refused(attack: Attack) -> None:
    """Files in memory, the system's shared memory and message queues, secret memory, and shared memory without a file."""
    refused(
        attack,
        "os.memfd_create('a')\ncall(29, 0, 1 << 20, 0o1600)\ncall(68, 0, 0o1600)\ncall(447, 0)\nmmap.mmap(-1, 1 << 20)\n"
        "call(9, 0, 1 << 21, 3, 0x40022, -1, 0)\ncall(240, b'q', 0o102, 0o600, 0)\ncall(248, b'user', b'a', b'b' * 1000, 1000, -2)",
    )
    assert (
        printed(
            attack, "import mmap\nm = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nm[0] = 7\nprint(m[0])"
        )
        == "7\n"
    )


def test_zeroes_of_the_machine_cannot_be_shared(attack: Attack) -> None:
    status, _, stdout = attack(
        "import mmap, os\nfd = os.open('/dev/zero', os.O_RDWR)\nmmap.mmap(fd, 1 << 20)\nprint('mapped')"
    )
    assert status == "error" and stdout == ""
    assert (
        len(
            printed(
                attack, "import os\nopen('/dev/null', 'w').write('a')\nprint(len(open('/dev/urandom', 'rb').read(4)))"
            )
        )
        == 2
    )


def test_pipes_cannot_be_grown(attack: Attack) -> None:
    program = "import fcntl, os\nr, w = os.pipe()\ntry: fcntl.fcntl(w, 1031, 1 << 20)\nexcept OSError: print('refused')\nos.write(w, b'a')\nprint(os.read(r, 1))"
    assert printed(attack, program) == "refused\nb'a'\n"


def test_files_of_a_run_count_together(attack: Attack) -> None:
    program = f"import time\nfor i in range(40):\n    open(str(i), 'wb').write(b'x' * ({DISK_MB} << 18))\ntime.sleep(3)\nprint('wrote')"
    status, _, stdout = attack(program)
    assert status == "error" and stdout == ""
    assert printed(attack, "open('a', 'w').write('b' * 1000)\nprint(len(open('a').read()))") == "1000\n"


def test_files_without_a_name_do_not_escape_the_count(attack: Attack) -> None:
    program = f"import os, time\nheld = []\nfor i in range(40):\n    f = open(str(i), 'wb'); os.unlink(str(i)); f.write(b'x' * ({DISK_MB} << 18)); f.flush(); held.append(f)\ntime.sleep(3)\nprint('wrote')"
    assert attack(program)[0] == "error"
    program = "import os\nheld = [os.open('.', 0o20200000 | os.O_RDWR) for _ in range(8)]\nfor fd in held: os.write(fd, b'x' * (1 << 20))\nprint('wrote')"
    assert attack(program)[0] == "error"


def test_too_many_files_are_refused(attack: Attack) -> None:
    assert (
        attack("import os, time\nfor i in range(8000): os.close(os.open(str(i), os.O_CREAT))\ntime.sleep(2)")[0]
        == "error"
    )


# -- processes and time ------------------------------------------------------------------------------------------------------


def test_processes_are_limited(attack: Attack) -> None:
    program = "import os, time\nn = 0\ntry:\n    while n < 60:\n        if os.fork() == 0: time.sleep(20); os._exit(0)\n        n += 1\nexcept OSError: pass\ntime.sleep(0.5)\nprint(n)"
    status, _, stdout = attack(program)
    assert status == "error" or int(stdout) < PROCESSES + 12  # of a user who is shared, others count too
    assert printed(attack, "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('ok')") == "ok\n"


def test_threads_are_limited(attack: Attack) -> None:
    program = "import os, threading, time\nn = 0\ntry:\n    while n < 60:\n        threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\ntime.sleep(0.5)\nprint(n, flush=True)\nos._exit(0)"
    status, _, stdout = attack(program)
    assert status == "error" or int(stdout) < PROCESSES + 12


def test_nothing_outlives_its_run(attack: Attack) -> None:
    """Neither a daemon of two forks, nor one that ignores signals, nor one that keeps the output open."""
    mark = f"{1000 + os.getpid()}.{secrets.randbelow(10**6)}"
    program = f"import os, signal, subprocess\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)\n        if os.fork(): os._exit(0)\n        os.execvp('sleep', ['sleep', '{mark}'])\nprint('left')"
    assert attack(program)[0] in ("passed", "error")
    alive = [e for e in Path("/proc").glob("[0-9]*/cmdline") if mark in read(e)]
    assert not alive


def read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def test_a_loop_a_sleep_and_a_stopped_process_end_in_time(attack: Attack) -> None:
    for program in (
        "while True: pass",
        "import time\ntime.sleep(99)",
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    ):
        assert attack(program, None, "", 0.3)[0] == "timeout"
    assert attack("def f():\n    while True: pass", "f()", "", 0.3)[0] == "timeout"


def test_output_is_limited(attack: Attack) -> None:
    assert attack("while True: print('x' * 4096)")[0] == "output"
    assert attack("import sys\nwhile True: sys.stderr.write('x' * 4096)")[0] == "output"


# -- the machine: files, processes, users, network, kernel -------------------------------------------------------------------


def test_no_room_can_be_made_inside(attack: Attack) -> None:
    """User, mount, process, network and other namespaces by unshare, clone and clone3; and the old and new ways to mount."""
    refused(
        attack,
        "call(272, 0x10000000)\ncall(272, 0x20000)\ncall(272, 0x40000000)\ncall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "call(56, 0x20000000 | 17, 0, 0, 0, 0)\ncall(435, ctypes.create_string_buffer(88), 88)\ncall(308, 0, 0)\n"
        "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)\ncall(430, b'tmpfs', 0)\ncall(432, 3, 0, 0)\ncall(428, -100, b'/', 0)\n"
        "call(429, 3, b'', -100, b'/tmp', 4)\ncall(442, -100, b'/', 0, 0, 0)\ncall(155, b'.', b'.')\ncall(161, b'.')\ncall(166, b'/', 2)",
    )


def test_kernel_interfaces_are_refused(attack: Attack) -> None:
    """Tracing, other processes' memory and descriptors, BPF, performance counters, user faults, io_uring, keys, modules, clocks."""
    refused(
        attack,
        "call(101, 16, 1, 0, 0)\ncall(310, 1, 0, 0, 0, 0, 0)\ncall(311, 1, 0, 0, 0, 0, 0)\ncall(438, 3, 0, 0)\ncall(434, 1, 0)\n"
        "call(321, 0, 0, 0)\ncall(298, 0, 0, -1, -1, 0)\ncall(323, 0)\ncall(425, 8, 0)\ncall(250, 0, 0, 0)\ncall(175, 0, 0, b'')\n"
        "call(227, 0, 0)\ncall(169, 0, 0, 0, 0)\ncall(304, -100, b'', 0)\ncall(303, -100, b'.', 0, 0, 0)\ncall(312, 1, 1, 0, 0, 0)\n"
        "call(157, 4, 1, 0, 0, 0)\ncall(157, 36, 1, 0, 0, 0)\ncall(157, 22, 2, 0, 0, 0)\ncall(317, 1, 0, 0)\ncall(126, 0, 0)\ncall(105, 0)",
    )


def test_no_socket_reaches_anything(attack: Attack) -> None:
    refused(
        attack,
        "socket.socket()\nsocket.socket(socket.AF_UNIX)\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n"
        "socket.create_connection(('127.0.0.1', 9))\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nsocket.getaddrinfo('example.com', 80)",
    )
    assert printed(attack, "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))") == "b'x'\n"


def test_files_of_the_machine_are_out_of_reach(attack: Attack, tmp_path: Path) -> None:
    """Read and written, directly, through links, and through a descriptor of the folder above."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    kept = tmp_path / "kept"
    kept.write_text(SECRET)
    kept.chmod(0o666)
    refused(
        attack,
        f"open({str(kept)!r})\nopen({str(kept)!r}, 'a')\nos.truncate({str(kept)!r}, 0)\nos.remove({str(kept)!r})\n"
        f"os.rename({str(kept)!r}, 'here')\nos.link({str(kept)!r}, 'here')\nos.symlink({str(kept)!r}, 'l'); open('l')\n"
        f"os.chmod({str(kept)!r}, 0)\nos.utime({str(kept)!r}, (0, 0))\nos.setxattr({str(kept)!r}, 'user.a', b'')\n"
        f"open({str(tmp_path / 'new')!r}, 'x')\nos.listdir({str(tmp_path)!r})\nopen('../' * 9 + 'etc/passwd')\n"
        "open('/etc/passwd')\nopen('/usr/attack', 'w')\nopen('/etc/shadow')\nos.listdir('/proc/self/fd')\nopen('/proc/1/environ')\nos.listdir('/sys/kernel')",
    )
    assert kept.read_text() == SECRET and os.listdir(tmp_path) == ["kept"]
    assert (
        printed(
            attack, "import os\nos.mkdir('a')\nopen('a/b', 'w').write('c')\nprint(os.listdir('.'), open('a/b').read())"
        )
        == "['a'] c\n"
    )


def test_other_processes_are_out_of_reach(attack: Attack) -> None:
    """Signals, limits, priorities, processors and memory of a process of the same user, and of the one that holds the run."""
    victim = os.getpid()
    refused(
        attack,
        f"os.kill({victim}, 0)\nos.kill(os.getppid() or {victim}, 9)\ncall(234, {victim}, {victim}, 9)\ncall(302, {victim}, 0, 0, 0)\n"
        f"call(302, os.getppid() or {victim}, 0, 0, 0)\nos.setpriority(0, {victim}, 19)\nos.sched_setaffinity({victim}, [0])\n"
        f"call(144, {victim}, 0, 0)\nopen('/proc/{victim}/mem')\nopen('/proc/{victim}/environ')\ncall(256, {victim}, 0, 0, 0)\ncall(424, 3, 9, 0, 0)",
    )


def test_the_judge_is_out_of_reach(attack: Attack) -> None:
    """A program looks for its judge among all processes, to read it or to end it."""
    program = (
        "import os\ndef f(x):\n    found = 0\n    for pid in range(2, 40000):\n"
        "        try: os.kill(pid, 9) if pid != os.getpid() else None\n        except OSError: continue\n        found += pid != os.getpid()\n"
        "    return found\n"
    )
    assert attack(program, "assert f(1) == 0")[:2] == ("passed", "")


def test_privileges_cannot_be_had(attack: Attack) -> None:
    refused(
        attack, "os.setuid(0)\nos.setgid(0)\nos.setgroups([0])\nos.chroot('.')\nos.chown('.', 0, 0)\ncall(126, 0, 0)"
    )
    assert (
        attack("import subprocess\nprint(subprocess.run(['su', '-c', 'id'], capture_output=True, text=True).stdout)")[
            2
        ].strip()
        == ""
    )
    found = printed(
        attack,
        "import ctypes\nl = ctypes.CDLL(None)\nprint([l.prctl(3, 0, 0, 0, 0) >= 0], __import__('os').getuid() != 0 or 'root')",
    )
    assert found.startswith("[True]")


def test_a_terminal_gets_no_input(attack: Attack) -> None:
    program = "import fcntl\nfor fd in (0, 1, 2):\n    try: fcntl.ioctl(fd, 0x5412, b'x'); print('sent')\n    except OSError: print('refused')"
    assert printed(attack, program) == "refused\n" * 3


def test_secrets_of_the_service_are_not_inherited(attack: Attack) -> None:
    assert printed(attack, "import os\nprint(sorted(os.environ))") == "['HOME', 'LANG', 'PATH', 'TMPDIR']\n"


def test_runs_leave_nothing_for_the_next_one(attack: Attack) -> None:
    assert printed(attack, "import os\nopen('left', 'w').write('a')\nprint(os.listdir('.'))") == "['left']\n"
    assert (
        printed(
            attack,
            "import os\nprint(os.listdir('.'), os.listdir('/tmp') if os.access('/tmp', os.R_OK) and os.getcwd() == '/box' else [])",
        )
        == "[] []\n"
    )
