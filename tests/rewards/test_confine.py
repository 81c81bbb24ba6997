"""What a verifier's process can do to the machine when an answer is a program: read and compute."""

import asyncio
import os
import platform
import socket
import sys
from pathlib import Path

import pytest

from jaxrl_llm.protocols import Down
from jaxrl_llm.rewards.services.pool import Failed, Pool, _accept
from jaxrl_llm.serving import bare_environment, without_secrets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")

# System calls of this machine, by number.
NUMBERS = {"x86_64": (29, 310, 101, 272), "aarch64": (194, 270, 117, 97)}
SHMGET, READ_MEMORY, TRACE, UNSHARE = NUMBERS[platform.machine()]


def libc(*call: int) -> str:
    """An expression that makes a system call, and raises its error."""
    made = f"__import__('ctypes').CDLL(None, use_errno=True).syscall{call}"
    error = "OSError(__import__('ctypes').get_errno(), 'refused')"
    return f"{made} < 0 and (_ for _ in ()).throw({error})"


ENTRY = {"question": "", "answer": "1 2", "metadata": {"solution": [1, 2]}}


def attempts(folder: Path, port: int, victim: int) -> dict[str, str]:
    """Expressions that would harm the machine, each as an answer could hold it."""
    kept = str(folder / "kept")
    return {
        "write": f"open({kept!r}, 'w')",
        "append": f"open({kept!r}, 'a')",
        "create": f"open({str(folder / 'new')!r}, 'x')",
        "remove": f"__import__('os').remove({kept!r})",
        "rename": f"__import__('os').rename({kept!r}, {kept + '2'!r})",
        "make a folder": f"__import__('os').mkdir({str(folder / 'made')!r})",
        "change modes": f"__import__('os').chmod({kept!r}, 0)",
        "truncate": f"__import__('os').truncate({kept!r}, 0)",
        "link": f"__import__('os').symlink({kept!r}, {str(folder / 'link')!r})",
        "connect": f"__import__('socket').create_connection(('127.0.0.1', {port}))",
        "start a shell": "__import__('subprocess').check_output('id', shell=True)",
        "become a shell": "__import__('os').execv('/bin/sh', ['sh'])",
        "fork": "__import__('os').fork()",
        "signal": f"__import__('os').kill({victim}, 9)",
        "limits of another process": f"__import__('resource').prlimit({victim}, 0, (1, 1))",
        "an access list": f"__import__('os').setxattr({kept!r}, 'user.a', b'b')",
        "times": f"__import__('os').utime({kept!r}, (0, 0))",
        "shared memory of the system": libc(SHMGET, 0, 4096, 0o1600),
        "a file in memory": "__import__('os').memfd_create('a')",
        "priority of another process": f"__import__('os').setpriority(0, {victim}, 19)",
        "processors of another process": f"__import__('os').sched_setaffinity({victim}, [0])",
        "memory of another process": libc(READ_MEMORY, victim, 0, 0, 0, 0, 0),
        "trace": libc(TRACE, 16, victim, 0, 0),
        "a room": libc(UNSHARE, 0x10000000),
    }


def test_an_answer_that_is_a_program_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "kept").write_text("as it was")

    async def run() -> dict[str, str]:
        pool = Pool(workers=1, limit_s=20.0)
        outcomes = {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            for name, program in attempts(tmp_path, server.getsockname()[1], os.getpid()).items():
                with pytest.raises(Failed) as failed:
                    await pool.call("builtins", "eval", program)
                outcomes[name] = str(failed.value)
        variables = await pool.call("builtins", "eval", "sorted(__import__('os').environ)")
        threads = await pool.call(
            "builtins",
            "eval",
            "list(__import__('concurrent.futures').futures.ThreadPoolExecutor(2).map(abs, [-1, -2]))",
        )
        pool.close()
        assert "HF_TOKEN" not in variables and "PATH" in variables
        assert threads == [1, 2], "threads are a matter of computing"
        return outcomes

    for name, outcome in asyncio.run(run()).items():
        assert outcome.startswith("PermissionError: [Errno 1]"), (name, outcome)
    assert (tmp_path / "kept").read_text() == "as it was" and (tmp_path / "kept").stat().st_mode & 0o777
    assert [f.name for f in tmp_path.iterdir()] == ["kept"]


def test_a_scorer_that_evaluates_answers_cannot_be_made_to_write(tmp_path):
    """reasoning-gym's scorer of spirals gives 0.1 to a Python list of the right numbers: it runs the answer."""
    target = tmp_path / "written"

    async def run() -> list[float]:
        pool = Pool(workers=1, limit_s=60.0, warm=("jaxrl_llm.rewards.reasoning_gym", "load"))
        answers = ("[1] + [2]", f"[1, (open({str(target)!r}, 'w'), 2)[1]]")
        calls = [
            pool.call("jaxrl_llm.rewards.reasoning_gym", "judge", "spiral_matrix", "{}", ENTRY, a) for a in answers
        ]
        scores = list(await asyncio.gather(*calls))
        pool.close()
        return scores

    assert asyncio.run(run()) == [0.1, 0.0]
    assert not target.exists()


def test_secrets_are_told_by_their_names():
    given = {
        "PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "x", "WANDB_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "JAXRL_LLM_TOKEN": "x", "db_password": "x", "OPENAI_APIKEY": "x",
        "TOKENIZERS_PARALLELISM": "0",
    }  # fmt: skip
    assert set(bare_environment(given)) == {"PATH", "LC_ALL", "OMP_NUM_THREADS"}
    assert set(without_secrets(given)) == {
        "PATH",
        "LC_ALL",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "TOKENIZERS_PARALLELISM",
    }


def test_verifiers_do_not_start_where_they_cannot_be_shut_in_unless_that_is_allowed(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rewards.services.pool._said", [])
    monkeypatch.delenv("JAXRL_LLM_ALLOW_WEAK_ISOLATION", raising=False)
    with pytest.raises(Down, match=r"cannot be shut in here: no libseccomp.*JAXRL_LLM_ALLOW_WEAK_ISOLATION=1"):
        _accept("no libseccomp")
    monkeypatch.setenv("JAXRL_LLM_ALLOW_WEAK_ISOLATION", "1")
    _accept("no libseccomp")
