"""Starts `python -m jaxrl_llm.launch` from a process that has imported what a run imports: one import serves many runs.

The process (`python tests/forked.py`) begins no backend and forks once for each request that it reads.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What the run of tests/tiny.gin imports before it computes; what else it imports, each run imports for itself.
IMPORTED = (
    "jaxrl_llm.train.trainer",
    "jaxrl_llm.tools.fit",
    "grain",
    "orbax.checkpoint",
    "tensorboardX",
    "tokenizers",
    "transformers",
)


@functools.cache
def _server(settings: frozenset[tuple[str, str]]) -> "subprocess.Popen[str]":
    """The process of some of JAX's settings, which it reads when it is imported; it ends with this process."""
    environment = {**os.environ, **dict(settings), "PYTHONPATH": str(Path(__file__).parent)}
    for name in os.environ.keys() - dict(settings).keys():
        if name.startswith("JAX_"):
            del environment[name]
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment, start_new_session=True, **pipe)
    atexit.register(process.communicate)
    return process


def _kill(pid: int, moment: Callable[[str], bool], said: Path, sent: signal.Signals) -> None:
    """Sends a signal to a run once a moment has come; nothing where the run ends before."""
    with contextlib.suppress(ProcessLookupError):
        while not moment(said.read_text()):
            time.sleep(0.002)
            os.kill(pid, 0)
        os.kill(pid, sent)


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    moment: Callable[[str], bool] | None = None,
    sent: signal.Signals = signal.SIGKILL,
) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m jaxrl_llm.launch` with these arguments in the checkout's root, to its end.

    Args:
      arguments: what stands behind the command.
      environment: all of the run's environment.
      timeout: seconds after which the run is killed.
      moment: whether `sent` is due, of what the run has printed so far; asked until it is.
      sent: the signal.

    Raises:
      subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    server = _server(frozenset((n, x) for n, x in environment.items() if n.startswith("JAX_")))
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": folder, "timeout": timeout}
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            if moment is not None:
                _kill(pid, moment, outputs[0], sent)
            answer = server.stdout.readline()
        except BaseException:
            # A test's own limit of time: the answer to this request is not that to the next one.
            _server.cache_clear()
            os.killpg(server.pid, signal.SIGKILL)
            raise
        assert answer, f"the process that starts runs ended: {server.wait()}"
        said = [output.read_text() for output in outputs]
    code = json.loads(answer)
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, *said)
    return subprocess.CompletedProcess(list(arguments), code, *said)


def _ended(pid: int, timeout: float) -> int | None:
    """The exit code of a child, as `subprocess` says it; a child that takes longer is killed, and has none."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _become(request: Mapping[str, Any]) -> None:
    """Makes a forked child the process that the request asks for: its environment, its output files, its arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    outputs = [os.open(f"{request['folder']}/{name}", os.O_WRONLY) for name in ("stdout", "stderr")]
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
        os.dup2(file, number)
    sys.argv = ["launch", *request["arguments"]]


def serve() -> None:
    """Forks a child for each request, a line of JSON, and answers with its process id and, once it ended, its exit code."""
    sys.path[0] = str(ROOT)  # as `python -m` has it
    sys.modules["torch"] = None  # type: ignore[assignment]  # as launch has it, and the next line
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX has no thread before its backend begins
            pid = os.fork()
        if not pid:
            _become(request)
            runpy.run_module("jaxrl_llm.launch", run_name="__main__", alter_sys=True)
            return
        print(pid, flush=True)
        print(json.dumps(_ended(pid, request["timeout"])), flush=True)


if __name__ == "__main__":
    serve()
