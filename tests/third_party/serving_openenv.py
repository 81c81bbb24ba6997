"""Starts an OpenEnv server in an environment of its own (OPENENV_PYTHON)."""

import functools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
SERVER = Path(__file__).parent / "openenv_server.py"


@functools.cache
def has_openenv() -> bool:
    """Whether PYTHON has it."""
    return not subprocess.run([PYTHON, "-c", "import openenv.core"], capture_output=True).returncode


@contextmanager
def serving(kind: str, folder: Path, server: Path = SERVER) -> Iterator[str]:
    """The address of a server of `kind`, whose log is in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "openenv.log").open("w") as log:
        running = subprocess.Popen([PYTHON, str(server), kind, str(port)], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert running.poll() is None and time.monotonic() < until, (folder / "openenv.log").read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()
