"""Starts tests/tiny.gin as a user starts a run, and reads what it leaves."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import forked

from jaxrl_llm import launch as launcher

ROOT = Path(__file__).parent.parent
GIN_FILE = str(Path(__file__).with_name("tiny.gin"))
RL_ALONE = {"train.Run.stages": "[@rl/train.Stage()]"}


def bindings(run_dir: Path, **more: Any) -> list[str]:
    """gin bindings of the tiny run; `more` overrides the file."""
    return [f"{name}={value}" for name, value in {"RUN_DIR": repr(str(run_dir)), **more}.items()]


def arguments(run_dir: Path, gin_file: str = GIN_FILE, **more: Any) -> list[str]:
    """What a user would type after the command."""
    return [f"--gin_file={gin_file}", *(f"--gin={b}" for b in bindings(run_dir, **more))]


def command(run_dir: Path, gin_file: str = GIN_FILE, **more: Any) -> list[str]:
    """The launch command a user would type."""
    return [sys.executable, "-m", "jaxrl_llm.launch", *arguments(run_dir, gin_file, **more)]


def environment(devices: int = 1) -> dict[str, str]:
    """CPU devices; the tests' folder is on the path, for the reward."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}


def launch(run_dir: Path, gin_file: str = GIN_FILE, devices: int = 1, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end, in a fork of a process that has imported the package."""
    return forked.launch(arguments(run_dir, gin_file, **more), environment(devices), timeout=500)


def interrupted(
    run_dir: Path,
    moment: Callable[[str], bool],
    gin_file: str = GIN_FILE,
    sent: signal.Signals = signal.SIGKILL,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs the command as `launch` does, and sends it a signal where `moment` is true of what it has printed."""
    given = arguments(run_dir, gin_file, **more)
    return forked.launch(given, environment(), timeout=500, moment=moment, sent=sent)


def refused(run_dir: Path, gin_file: str = GIN_FILE, **more: Any) -> str:
    """What the command says in this process, where it sees one device and does not begin a run with these settings."""
    import jax  # after the settings that the tests' process gives it

    said = io.StringIO()
    with mock.patch.object(jax, "devices", return_value=jax.devices()[:1]), contextlib.redirect_stderr(said):
        code = launcher.main(arguments(run_dir, gin_file, **more))
    assert code == 1, (code, said.getvalue())
    return said.getvalue()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds, without what a clock or a restart decides."""
    clocked = ("time/", "speed/", "sampler/", "compilations")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{n: v for n, v in json.loads(line).items() if not n.startswith(clocked)} for line in lines]
